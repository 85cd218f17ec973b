"""What users can ask about an annotated model, and how errors in it are reported."""

from composable.report import explain as explain

"""What users can ask about an annotated model, and what errors in it are told."""

from composable.report import explain as explain

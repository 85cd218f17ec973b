"""What users can ask about an annotated model, and how errors in it are reported."""

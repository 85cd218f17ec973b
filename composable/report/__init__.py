"""What users can ask about an annotated model."""

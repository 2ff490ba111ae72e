"""The model card beside an engine: README.md in Hugging Face's format."""

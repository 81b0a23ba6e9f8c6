"""From checkpoint files to parameters: index (what is stored where), parameters (what the model needs), loader."""

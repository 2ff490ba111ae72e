"""Tasks of encoders with decoders, which write text token by token: models in several parts, an engine for each."""

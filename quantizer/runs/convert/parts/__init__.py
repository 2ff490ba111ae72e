"""The conversion of models in several parts, an engine for each: encoders with decoders, which write text."""

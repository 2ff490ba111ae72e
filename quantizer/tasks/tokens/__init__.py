"""Tasks whose answer is in the tokens of a text: tags, spans, words that are missing, words that follow."""

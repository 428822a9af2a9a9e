"""Does a longer context help? Perplexity by length, and a number hidden in a long text."""

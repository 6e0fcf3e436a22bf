"""Weight formats: how the weights of a linear layer are stored, cut and multiplied. One file a format."""

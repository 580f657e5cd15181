"""From the tensors of a layer to launches, once a layer."""

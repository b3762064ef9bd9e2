"""What of a model acts on gradients beside its operators: backwards of their own (``custom``) and hooks (``hooks``)."""

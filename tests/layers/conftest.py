import warnings

with warnings.catch_warnings():
    # PyTorch Geometric scripts a class while it is imported, which PyTorch deprecates.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch_geometric.nn  # noqa: F401

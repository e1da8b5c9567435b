"""Programs as torch operations that train: derivatives wired into autograd, and the modules that are built of them."""

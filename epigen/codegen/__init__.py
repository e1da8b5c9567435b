"""From a typed graph and a call's dtypes to readable kernel source."""

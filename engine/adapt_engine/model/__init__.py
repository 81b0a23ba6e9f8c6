"""The decoder, assembled from LayerSpec; one code path for prefill, decode and everything between."""

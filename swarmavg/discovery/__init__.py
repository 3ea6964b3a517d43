"""Small signed records that members publish and look up."""

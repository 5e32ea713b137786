"""Vectors of images: compute them for a whole collection, and find the most similar images.

    from vitkern.embedding import Encoder, Vectors, embed, nearest

    embed(["photos/"], "vectors.parquet", Encoder.open("deit_tiny.safetensors"))
    vectors = Vectors.open("vectors.parquet")
    encoder = Encoder.of_recipe(vectors.about["recipe"])
    query = encoder(encoder.pixels(image)[None])  # of a PIL image
    nearest(vectors, query, top=5)

The commands `vitkern embed` and `vitkern search` are these functions.
"""

from .encoder import Encoder
from .job import Report, embed
from .neighbours import Neighbour, nearest
from .vector_files import Vectors

__all__ = ["Encoder", "Neighbour", "Report", "Vectors", "embed", "nearest"]

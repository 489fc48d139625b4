"""The demo as a Hugging Face Space: the page of `recguide demo`, with the embedded model."""

from functools import partial

from recguide.demo import start
from recguide.loading import TINY, load

if __name__ == "__main__":
    start({TINY: partial(load, TINY, "float32", "cpu")})

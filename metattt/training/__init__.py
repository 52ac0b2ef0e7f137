"""Training: the outer loop, through Lightning, which every module here needs."""

from metattt.optional import MissingExtra, absence, need

need("lightning", extra="train", what="training")
if line := absence("matplotlib", extra="train", what="training"):  # else its curves fail when everything is done
    raise MissingExtra(line)

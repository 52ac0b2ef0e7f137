"""Novel views: pictures of a scene from some cameras are given, and pictures from others are asked for."""

from __future__ import annotations

import numpy as np

from metattt.data.sequences import OF_SEQUENCES, Part, SequenceData
from metattt.errors import MetaTTTError, check_integer, shown
from metattt.registry import register
from metattt.setting import setting

DISTANCE, OPENING = 3.0, 0.35  # of cameras from the middle of a scene; of half a picture at the distance 1
FLAT = (1.0, 1.0, 0.3)  # cameras stand around a scene rather than above and below it
GIVEN, ASKED, HIDDEN = 1, -1, 0  # the last number of a token


@register(group="data", name="novel_views")
class NovelViewsData(SequenceData, takes=("given", "asked", "spheres", "image_size", "patch_size", *OF_SEQUENCES)):
    """Scenes of coloured spheres on black, lit from above, and n views of each to answer others from (the setting of
    LaCT, arXiv 2505.23884, Sec. 4.1, with scenes that are drawn).

    A token is a patch of a view: of each of its pixels the ray in Plücker coordinates `(d, o × d)`, then their colours
    from 0 to 1, and 1; where the view is asked for, zeros and −1; all zeros where it is hidden. Labels are the colours
    that are asked for, and NaN elsewhere. Sequences take n from `given` in turn, and a held-out scene comes once with
    each, so that their errors differ by n alone.

    Args:
        given: n, numbers of given views, which rise; 0 asks for views of a scene that was never seen.
        asked: views that are asked for.
        spheres: their number in a scene; centres up to 0.8 from the middle, radii from 0.2 to 0.5.
        image_size, patch_size: of a picture and of a token (pixels in a row); the second divides the first.
        validation_size: scenes to validate on, and as many to test on.
        batch_size, seed, num_workers: see `SequenceData`.
    """

    trained_by = "metattt.training.sequence_module:ViewJob"

    given: tuple[int, ...] = setting(default=(0, 1, 2, 4, 8))
    asked: int = setting(default=2, most=1024)
    spheres: int = setting(default=2, most=1024)
    image_size: int = setting(default=16, most=1024)
    patch_size: int = setting(default=4, most=1024)
    batch_size = 16
    validation_size = 64

    def check_settings(self) -> None:
        super().check_settings()
        given, size, patch = tuple(self.given), self.image_size, self.patch_size
        for one in given:
            check_integer("data.given", one, least=0, most=1024)
        if not given or list(given) != sorted(set(given)):
            raise MetaTTTError(f"data.given={shown(given)} is not allowed: its numbers must rise, data.given=[1,2,4]")
        if size % patch:
            raise MetaTTTError(f"data.patch_size={patch} does not divide data.image_size={size}")
        self.given, self.view_tokens = given, (size // patch) ** 2
        self.length, self.colours = (given[-1] + self.asked) * self.view_tokens, 3 * patch**2
        self.inputs: int = 3 * self.colours + 1
        self.validation_size *= len(given)

    def describe(self) -> str:
        views = f"{', '.join(map(str, self.given))} views given and {self.asked} asked for"
        return f"scenes of {self.spheres} spheres, {views}, {self.image_size} x {self.image_size} pixels"

    def sequence(self, part: Part, index: int) -> tuple[np.ndarray, np.ndarray]:
        kinds = len(self.given)
        tokens, labels = super().sequence(part, index if part == "train" else index // kinds)
        tokens[self.given[index % kinds] * self.view_tokens : self.given[-1] * self.view_tokens] = HIDDEN
        return tokens, labels

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A scene with as many given views as there may be."""
        count = self.spheres
        centres = random.standard_normal((count, 3))
        centres *= 0.8 * random.random((count, 1)) ** (1 / 3) / np.linalg.norm(centres, axis=1, keepdims=True)
        spheres = centres, random.uniform(0.2, 0.5, count), random.uniform(0, 1, (count, 3))
        origins, rays = cameras(random.standard_normal((self.given[-1] + self.asked, 3)) * FLAT, self.image_size)
        colours = self._patches(render(origins, rays, spheres))
        tokens = np.zeros((self.length, self.inputs), np.float32)
        labels = np.full((self.length, self.colours), np.nan, np.float32)
        first = self.given[-1] * self.view_tokens
        tokens[:, : 2 * self.colours] = self._patches(np.concatenate([rays, np.cross(origins, rays)], axis=-1))
        tokens[:first, 2 * self.colours : -1], labels[first:] = colours[:first], colours[first:]
        tokens[:first, -1], tokens[first:, -1] = GIVEN, ASKED
        return tokens, labels

    def _patches(self, pictures: np.ndarray) -> np.ndarray:
        """`[V, h, w, c]` to the patches of all views `[V · view_tokens, patch² · c]`, row by row."""
        size, patch = self.image_size // self.patch_size, self.patch_size
        cut = pictures.reshape(len(pictures), size, patch, size, patch, -1).swapaxes(2, 3)
        return cut.reshape(len(pictures) * self.view_tokens, -1)


def cameras(towards: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Cameras in the directions `towards` `[V, 3]`, of any length, that look at the middle: their places `[V, 1, 1, 3]`
    and, for pictures of `size` rows, unit directions of the rays through the middles of pixels `[V, size, size, 3]`."""
    back = (towards / np.linalg.norm(towards, axis=1, keepdims=True))[:, None, None]
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right, axis=-1, keepdims=True)
    at = OPENING * (2 * (np.arange(size) + 0.5) / size - 1)
    rays = at[:, None] * right - at[:, None, None] * np.cross(back, right) - back
    return DISTANCE * back, rays / np.linalg.norm(rays, axis=-1, keepdims=True)


def render(origins: np.ndarray, rays: np.ndarray, spheres: tuple[np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
    """Colours `[..., 3]` of rays from `origins` in unit directions `[..., 3]` past spheres, which are centres `[S, 3]`,
    radii `[S]` and colours `[S, 3]`: that of the first one that a ray meets, times 0.7 + 0.3 n_z, n its unit normal
    there; black where it meets none."""
    centres, radii, albedo = spheres
    to_centre = centres - origins[..., None, :]
    along = (to_centre * rays[..., None, :]).sum(-1)
    inside = along**2 - (to_centre**2).sum(-1) + radii**2
    depth = np.where(inside > 0, along - np.sqrt(np.maximum(inside, 0)), np.inf)
    first, near = depth.argmin(-1), depth.min(-1, keepdims=True)
    met = np.isfinite(near)
    height = (origins + np.where(met, near, 0) * rays - centres[first])[..., 2:] / radii[first][..., None]
    return np.where(met, albedo[first] * (0.7 + 0.3 * height), 0.0)

"""What a conversion tells: the report of what was written, and the certificate of how far it was proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import ConversionError, some

TOLERANCE = 1e-5  # of the spread: float32 has 6e-8, and sums over a few thousand channels lose about two digits


def numbers_in_words(made: str, cast: str | None) -> str:
    """How numbers differ from those on disk; empty where they do not."""
    return ", ".join(part for part in (made, f"cast to {cast}" if cast else "") if part)


@dataclass(frozen=True)
class Certificate:
    """What `verify` measured.

    Attributes:
        original, ours, family: what was compared.
        prompts, prompt_tokens: rows, and positions compared in all of them together (padding is not).
        max_logit_difference: largest absolute difference of two logits; of two hidden states, where there is no head.
        logit_spread: largest minus smallest logit of the original over the same positions.
        relative_logit_difference: the first divided by the second.
        argmax_agreement: share of positions (of texts, for a sequence classifier) with the same most likely token or
            label.
        new_tokens: tokens generated greedily for each prompt, with a cache; 0 for models that do not generate.
        greedy_equal: whether all of them are the same.
        first_divergent_layer: index into the hidden states (0: the embedding, n: after block n, the last after the
            final norm) of the first that differs by more than the tolerance times its spread; None: none does.
        tensors: tensors of the original, those left out on purpose not counted.
        tensors_different: names of those that do not come back byte for byte.
        dropped: how many tensors of the original the conversion leaves out (legacy buffers).
        sha256: over name, dtype, shape and bytes of the original's tensors in the order of their names.
        tolerance: bound on relative differences.
        versions: of the libraries that computed this.
        made: how the original's numbers came about that are not on disk; empty where all are.
        cast: the dtype that ours were cast to, and the original's with them before the two were compared; None: as
            stored.
    """

    original: str
    ours: str
    family: str
    prompts: int
    prompt_tokens: int
    max_logit_difference: float
    logit_spread: float
    relative_logit_difference: float
    argmax_agreement: float
    new_tokens: int
    greedy_equal: bool
    first_divergent_layer: int | None
    tensors: int
    tensors_different: tuple[str, ...]
    dropped: int
    sha256: str
    tolerance: float
    versions: dict[str, str]
    made: str = ""
    cast: str | None = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What is not as it should be, in words; empty for a faithful conversion."""
        checks = {
            f"logits differ by {self.relative_logit_difference:.2e} of their spread": (
                self.relative_logit_difference <= self.tolerance
            ),
            f"hidden states differ from layer {self.first_divergent_layer} on": self.first_divergent_layer is None,
            "greedy tokens differ": self.greedy_equal,
            f"tensors are not {self.as_expected}: {some(self.tensors_different)}": not self.tensors_different,
        }
        return tuple(problem for problem, fine in checks.items() if not fine)

    @property
    def as_expected(self) -> str:
        """What each tensor is to be on the way back."""
        words = numbers_in_words(self.made, self.cast)
        return f"the original's, {words}" if words else "the original's, byte for byte"

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def facts(self) -> dict[str, str]:
        """What was measured, in words. Where the two models lie on a disk is not among it."""
        return {
            "logits": f"differ by at most {self.max_logit_difference:.1e}, {self.relative_logit_difference:.1e} of "
            f"their spread (bound {self.tolerance:.0e}), over {self.prompt_tokens:,} tokens in fp32"
            + (f", both with weights cast to {self.cast}" if self.cast else ""),
            "hidden states": "equal within that bound in every layer"
            if self.first_divergent_layer is None
            else f"differ from layer {self.first_divergent_layer} on",
            "most likely token": f"the same at {self.argmax_agreement:.2%} of positions",
            "greedy tokens": f"{self.prompts} x {self.new_tokens} generated with a cache: "
            + ("equal" if self.greedy_equal else "different"),
            "bytes": f"{self.tensors - len(self.tensors_different):,} of {self.tensors:,} tensors come back as "
            f"{self.as_expected}{f', {self.dropped} left out on purpose' if self.dropped else ''}",
            "sha256": self.sha256,
            "computed with": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }

    def to_dict(self) -> dict[str, Any]:
        """The certificate in JSON's own types, with `ok` and `problems`."""
        return {"ok": self.ok, "problems": list(self.problems), **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Certificate:
        """What `to_dict` gave, read back.

        Raises:
            ConversionError: it is no certificate.
        """
        try:
            given = {name: value for name, value in values.items() if name not in ("ok", "problems")}
            return cls(**{**given, "tensors_different": tuple(given.get("tensors_different", ()))})
        except TypeError as error:
            raise ConversionError(f"This is no certificate of `verify`: {error}") from error


@dataclass(frozen=True)
class Report:
    """What a conversion or an export did.

    Attributes:
        source, destination: where from and where to.
        family: the foreign side's `model_type`.
        tensors, bytes: written.
        seconds: from the call to the last weight on disk, reading headers and planning included, verification not.
        megabytes_per_second: bytes written / 1e6 / seconds.
        peak_rss_bytes: the process's largest resident memory so far, pages of mapped source files included; None where
            the system does not tell.
        byte_exact: no number was changed; False after a cast to another dtype, and where numbers were made that are
            not on disk.
        made: how these came about; empty where there are none.
        cast: the dtype that tensors were cast to; None where none was.
        dropped: tensors of the source that were left out, and why that is safe.
        files: names of all files in the destination.
        certificate: of the verification, if one was asked for.
    """

    source: str
    destination: str
    family: str
    tensors: int
    bytes: int
    seconds: float
    megabytes_per_second: float
    peak_rss_bytes: int | None
    byte_exact: bool
    dropped: dict[str, str]
    files: tuple[str, ...]
    certificate: Certificate | None = None
    made: str = ""
    cast: str | None = None

    @property
    def numbers(self) -> str:
        """What became of the source's numbers, in words."""
        return numbers_in_words(self.made, self.cast) or "unchanged"

    def to_dict(self) -> dict[str, Any]:
        """The report in JSON's own types."""
        return {**asdict(self), "certificate": self.certificate and self.certificate.to_dict()}

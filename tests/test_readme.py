"""What the README shows is what the repository has."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_snippet_is_the_quickstart_example():
    (snippet,) = re.findall(
        r"<!-- examples/quickstart.py -->\n```python\n(.*?)```", README, re.DOTALL
    )
    assert snippet == (ROOT / "examples" / "quickstart.py").read_text()


def test_links_and_targets_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]
    for document in documents:
        for link in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_table_of_backends_follows_the_code():
    """The dtypes and operands in the README are those of the package's one table."""
    from jaxflash.spec import KERNELS

    row = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in re.findall(r"^\| (.*) \|$", README, re.MULTILINE)
        if len(cells := line.split("|")) == 4
    }
    for i, backend in ((1, "cpu"), (2, "cuda")):
        kernels = KERNELS[backend]
        assert row["head dims H and Hv"][i] == f"1 to {kernels.max_head_dim}"
        served = {"yes": True, "not yet": False}
        assert served[row["Hv other than H"][i]] == kernels.value_head_dim
        assert served[row["float32"][i]] == ("float32" in kernels.dtypes)
        assert served[row["`local_window_size`"][i]] == kernels.window
        masks = row["`mask`, `bias`, segment ids"][i]
        for name in ("mask", "bias", "query_segment_ids"):
            assert served[masks] == (name in kernels.operands)
        scores = row["`softcap`, `sinks`, `alibi_slopes`, dropout"][i]
        assert served[scores] == kernels.softcap
        for name in ("sinks", "alibi_slopes", "dropout_seed"):
            assert served[scores] == (name in kernels.operands)

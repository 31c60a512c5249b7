"""steps.csv: batches as text, and which files are no measured steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.columns import MEASURED_STEP_COLUMNS
from fastroof.errors import TableError
from fastroof.load.steps_file import format_runs, parse_runs, read_step_rows


class TestRuns:
    @given(st.lists(st.integers(0, 5000) | st.just(1), min_size=1, max_size=60))
    def test_round_trip(self, values):
        text = format_runs(values)
        assert parse_runs(text) == values
        assert format_runs(parse_runs(text)) == text

    @pytest.mark.parametrize(
        ("values", "text"), [([1] * 32 + [2048], "1x32;2048"), ([0], "0"), ([7, 7, 1, 7], "7x2;1;7")]
    )
    def test_text(self, values, text):
        assert format_runs(values) == text

    def test_runs_of_one_value_may_stand_side_by_side(self):
        assert parse_runs("1x2;1") == [1, 1, 1]

    @pytest.mark.parametrize(
        "text",
        ["", ";", "1;", "x3", "1x", "1x0", "-1", "1.5", " 1", "01", "1X2", "1x2x3", "1,2", "²", "1x9999999"],
    )
    def test_no_batch(self, text):
        with pytest.raises(TableError, match="batch"):
            parse_runs(text)

    @pytest.mark.parametrize("values", [[], [-1]])
    def test_nothing_to_write(self, values):
        with pytest.raises(TableError):
            format_runs(values)


class TestRows:
    def written(self, tmp_path, text):
        path = tmp_path / "steps.csv"
        path.write_bytes(text)
        return path

    def test_columns_are_read_by_name(self, tmp_path):
        model, tp = MEASURED_STEP_COLUMNS[0], MEASURED_STEP_COLUMNS[2]
        path = self.written(tmp_path, b"more,tp,model\n0,2,a\n,4,b\n9,8")
        assert read_step_rows(path, (model, tp)) == [{"model": "a", "tp": 2}, {"model": "b", "tp": 4}]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (b"", "need column model"),
            (b"model,tp", "need column model"),
            (b"model\na\n", "has columns model: measured steps need column tp"),
            (b"model,tp\na\n", "line 2: has 1 cells, the header 2"),
            (b"model,tp\na,1,2\n", "line 2: has 3 cells"),
            (b"model,tp\na,1\n,2\n", "line 3: column model is empty"),
            (b"model,tp\na,1.5\n", "line 2: invalid literal"),
            (b"model,tp\n\xff,1\n", "cannot be read"),
        ],
    )
    def test_no_steps(self, text, words, tmp_path):
        path = self.written(tmp_path, text)
        with pytest.raises(TableError) as refusal:
            read_step_rows(path, (MEASURED_STEP_COLUMNS[0], MEASURED_STEP_COLUMNS[2]))
        assert words in str(refusal.value)
        assert str(path) in str(refusal.value)

//! Schedules as CSV: a row for each rank, a cell for each action, as PyTorch's `torch.distributed.pipelining` writes
//! (`_dump_csv`) and reads them (`_load_csv`).
//!
//! Cells are `2F1`, `0SEND_F1`, `3UNSHARD` or `(0F7;7B3)OVERLAP_F_B`. An empty cell is a bubble: it is skipped, since
//! only the order counts. Which rank holds which stage, and how many stages and micro-batches there are, follows from
//! the cells.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::action::{Action, ActionKind, Cell, Schedule};
use super::stages::Placement;

/// Most bytes of a file.
pub const MAX_BYTES: u64 = 1 << 24;
/// Numbers of stages and micro-batches are below this.
const MAX_NUMBER: usize = 1 << 20;

/// Which actions are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CsvFormat {
    /// F, B, I and W: PyTorch's `compute_only`, to which PyTorch adds the rest.
    ComputeOnly,
    /// All kinds of actions that PyTorch knows: its `compute_comms`. Optimizer steps are left out.
    ComputeComms,
}

/// A file that is not a schedule. Rows and columns are counted from 1.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvError {
    /// A cell cannot be read, or contradicts another one.
    #[error("row {row}, column {column}, `{cell}`: {reason}")]
    Cell {
        /// Row of the cell.
        row: usize,
        /// Its column.
        column: usize,
        /// Its text.
        cell: String,
        /// What is wrong with it.
        reason: CellError,
    },
    /// A row without actions.
    #[error("row {row} has no action")]
    EmptyRow {
        /// The row.
        row: usize,
    },
    /// No row has this stage, but a row has a later one.
    #[error("no row has stage {stage}, but a row has stage {last}")]
    MissingStage {
        /// The stage.
        stage: usize,
        /// The last one that is in a row.
        last: usize,
    },
    /// There is no row at all.
    #[error("the table is empty")]
    Empty,
}

/// What is wrong with a cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// Neither one action nor two that overlap.
    #[error("expected an action: a stage, a kind and a micro-batch, such as `2F1`")]
    NoAction,
    /// F, B, I, W, sends and receives are of one micro-batch.
    #[error("the micro-batch is missing")]
    NoMicroBatch,
    /// The other kinds are of the whole stage.
    #[error("this kind of action has no micro-batch")]
    MicroBatch,
    /// Of two actions that overlap, the first must be F and the second B or I.
    #[error("expected one F that overlaps with one B or I, such as `(0F7;7B3)OVERLAP_F_B`")]
    NoOverlap,
    /// A stage is on one rank only.
    #[error("stage {stage} is also in row {other}")]
    StageOfOtherRow {
        /// The stage.
        stage: usize,
        /// The row in which it was first.
        other: usize,
    },
    /// The number of the stage or micro-batch is too large.
    #[error("numbers of stages and micro-batches must be below {MAX_NUMBER}")]
    TooLarge,
}

/// Writes a schedule.
pub fn write(schedule: &Schedule, format: CsvFormat) -> String {
    let is_written = |cell: &&Cell| {
        cell.actions().all(|action| match format {
            CsvFormat::ComputeOnly => action.kind.is_compute(),
            CsvFormat::ComputeComms => action.kind != ActionKind::Step,
        })
    };
    let mut text = String::new();
    for row in schedule.rows() {
        for (number, cell) in row.iter().filter(is_written).enumerate() {
            let comma = if number == 0 { "" } else { "," };
            write!(text, "{comma}{cell}").expect("writing to a string never fails");
        }
        text.push('\n');
    }
    text
}

/// Reads a schedule, in either format.
pub fn read(text: &str) -> Result<Schedule, CsvError> {
    let text = text.trim_end();
    if text.is_empty() {
        return Err(CsvError::Empty);
    }
    let mut reader = Reader::default();
    let lines = text.lines().enumerate();
    let rows = lines.map(|(rank, line)| reader.row(rank, line));
    let rows = rows.collect::<Result<Vec<_>, _>>()?;
    let last = reader.row_of_stage.keys().last().copied().unwrap_or(0);
    if let Some(stage) = (0..last).find(|stage| !reader.row_of_stage.contains_key(stage)) {
        return Err(CsvError::MissingStage { stage, last });
    }
    let placement = Placement::new(rows.len(), reader.row_of_stage.into_values().collect());
    Ok(Schedule::new(placement, reader.micro_batches, rows))
}

/// The stages and micro-batches of the cells read so far.
#[derive(Default)]
struct Reader {
    row_of_stage: BTreeMap<usize, usize>,
    micro_batches: usize,
}

impl Reader {
    fn row(&mut self, rank: usize, line: &str) -> Result<Vec<Cell>, CsvError> {
        let mut cells = Vec::new();
        for (column, text) in line.split(',').enumerate() {
            // A CSV writer may quote any cell.
            let text = text.trim().trim_matches('"').trim();
            if text.is_empty() {
                continue;
            }
            let cell = self.cell(rank, text).map_err(|reason| CsvError::Cell {
                row: rank + 1,
                column: column + 1,
                cell: text.to_owned(),
                reason,
            })?;
            cells.push(cell);
        }
        if cells.is_empty() {
            return Err(CsvError::EmptyRow { row: rank + 1 });
        }
        Ok(cells)
    }

    fn cell(&mut self, rank: usize, text: &str) -> Result<Cell, CellError> {
        let cell = parse_cell(rank, text)?;
        for action in cell.actions() {
            let stage = action.stage;
            let row = *self.row_of_stage.entry(stage).or_insert(rank);
            if row != rank {
                let other = row + 1;
                return Err(CellError::StageOfOtherRow { stage, other });
            }
            let needed = action.micro_batch.map_or(0, |number| number + 1);
            self.micro_batches = self.micro_batches.max(needed);
        }
        Ok(cell)
    }
}

fn parse_cell(rank: usize, text: &str) -> Result<Cell, CellError> {
    let Some(overlapped) = text.strip_prefix('(') else {
        return Ok(Cell::One(parse_action(rank, text)?));
    };
    let parts = overlapped.strip_suffix(")OVERLAP_F_B");
    let (forward, backward) = parts
        .and_then(|parts| parts.split_once(';'))
        .ok_or(CellError::NoOverlap)?;
    let forward = parse_action(rank, forward.trim())?;
    let backward = parse_action(rank, backward.trim())?;
    if forward.kind != ActionKind::Forward || !backward.kind.makes_input_gradient() {
        return Err(CellError::NoOverlap);
    }
    Ok(Cell::Overlapped { forward, backward })
}

/// An action of a rank.
pub(super) fn parse_action(rank: usize, text: &str) -> Result<Action, CellError> {
    let is_digit = |c: char| c.is_ascii_digit();
    let rest = text.trim_start_matches(is_digit);
    let name = rest.trim_end_matches(is_digit);
    let (stage, micro_batch) = (&text[..text.len() - rest.len()], &rest[name.len()..]);
    let kind = ActionKind::from_name(name).filter(|_| !stage.is_empty());
    let kind = kind.ok_or(CellError::NoAction)?;
    let micro_batch = match (kind.has_micro_batch(), micro_batch.is_empty()) {
        (true, true) => return Err(CellError::NoMicroBatch),
        (false, false) => return Err(CellError::MicroBatch),
        (false, true) => None,
        (true, false) => Some(number(micro_batch)?),
    };
    Ok(Action {
        rank,
        stage: number(stage)?,
        kind,
        micro_batch,
    })
}

fn number(digits: &str) -> Result<usize, CellError> {
    let number = digits.parse().ok().filter(|&number| number < MAX_NUMBER);
    number.ok_or(CellError::TooLarge)
}

#[cfg(test)]
#[path = "csv_tests.rs"]
mod tests;

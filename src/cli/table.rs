//! Tables of plain text, without lines between the cells.

use comfy_table::{CellAlignment, Table, presets};

/// The rows below each other, each ending in a newline; the columns that `is_number` names are aligned to the right.
pub(super) fn text(rows: impl IntoIterator<Item = Vec<String>>, is_number: impl Fn(usize) -> bool) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        if is_number(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt() + "\n"
}

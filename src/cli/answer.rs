//! What a program prints: the answer, if it is only asked something, and its errors.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use clap_complete::Shell;
use comfy_table::{CellAlignment, Table, presets};
use ddp_proto::exit;
use ddp_proto::printable::{self, Look};

use super::error::CliError;

/// What each line of the launcher's own begins with, which may stand among its workers'.
pub const OWN_PREFIX: &str = "[ddp-run] ";

/// Writes the whole of it. A reader that goes away has seen enough; every other failure is reported.
pub fn give(text: impl AsRef<[u8]>) -> ExitCode {
    let mut out = io::stdout().lock();
    given(out.write_all(text.as_ref()).and_then(|()| out.flush()))
}

/// Writes a report for people.
pub(super) fn give_report(text: &str) -> ExitCode {
    give(Look::of(&io::stdout()).apply(text, 0))
}

/// The answer, or why there is none.
pub(super) fn give_or_fail(text: Result<String, CliError>) -> ExitCode {
    text.map_or_else(|error| fail(&error, error.exit_code()), |text| give_report(&text))
}

/// A table without lines between its cells. The columns that `is_number` names are aligned to the right.
pub(super) fn table(
    rows: impl IntoIterator<Item = Vec<String>>,
    is_number: impl Fn(usize) -> bool,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).add_rows(rows);
    for (index, column) in table.column_iter_mut().enumerate() {
        if is_number(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt() + "\n"
}

/// The script by which a shell completes the words of a program.
pub fn completions(shell: Shell, mut program: clap::Command) -> ExitCode {
    let mut script = Vec::new();
    let name = program.get_name().to_owned();
    clap_complete::generate(shell, &mut program, name, &mut script);
    give(script)
}

/// What the parser of the command line says instead of arguments: help and versions are answers, all else is refused,
/// under the `prefix` that the program's errors have.
pub fn instead_of_arguments(words: &clap::Error, prefix: &str) -> ExitCode {
    if words.use_stderr() {
        // One word for it in all that we print.
        let text = words
            .render()
            .ansi()
            .to_string()
            .replace("\x1b[32mtip:", "\x1b[32mhint:");
        // In colours, where there is a terminal. Nothing is left to do where that cannot be printed.
        let _ = anstream::stderr().write_all(format!("{prefix}{text}").as_bytes());
        return ExitCode::from(exit::USAGE);
    }
    given(words.print().and_then(|()| io::stdout().flush()))
}

/// What came of writing an answer.
pub(super) fn given(written: io::Result<()>) -> ExitCode {
    match written {
        Err(source) if source.kind() != ErrorKind::BrokenPipe => {
            let error = CliError::machine("cannot write the answer to standard output")(source);
            fail(&error, error.exit_code())
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Writes lines of the launcher's own to stderr.
pub fn print_own(text: &str) {
    print(text, OWN_PREFIX);
}

/// Writes `[ddp-run] error: …` to stderr, as what the launcher says once workers run.
pub fn print_own_error(error: &dyn Display) {
    print(&format!("error: {error}"), OWN_PREFIX);
}

/// Writes `error: …` to stderr.
pub fn print_error(error: &dyn Display) {
    print(&format!("error: {error}"), "");
}

/// The same, and the exit code of a program that ends with it.
pub(super) fn fail(error: &dyn Display, exit_code: u8) -> ExitCode {
    print_error(error);
    ExitCode::from(exit_code)
}

/// In one write: standard error has no buffer, so a process that is killed between two would have said the half of it.
/// Nothing is left to do when that fails.
fn print(text: &str, prefix: &str) {
    let look = Look::of(&io::stderr());
    let text = look.apply(&printable::text(text), prefix.len());
    let prefix = look.prefix(prefix, None);
    let lines = text.lines().map(|line| format!("{prefix}{line}\n"));
    let _ = io::stderr().write_all(lines.collect::<String>().as_bytes());
}

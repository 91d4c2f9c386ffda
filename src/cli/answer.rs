//! The answer of a program that is only asked something, on its standard output.

use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use super::error::{CliError, print_error};

/// Writes the whole of it. A reader that goes away has seen enough; whoever gets nothing for another reason has to know.
pub fn give(text: impl AsRef<[u8]>) -> ExitCode {
    match written(&mut io::stdout().lock(), text.as_ref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn written(out: &mut dyn Write, text: &[u8]) -> Result<(), CliError> {
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        outcome => outcome.map_err(|source| CliError::Machine {
            what: "cannot write the answer to standard output",
            source,
        }),
    }
}

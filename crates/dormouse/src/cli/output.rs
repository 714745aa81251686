//! Tables for people, JSON for programs, and how bytes, times and ages are written.

use std::io::Write;

use comfy_table::Table;
use dormouse_types::Timestamp;
use serde::Serialize;

use super::context::Context;
use super::error::{CliError, ExitStatus};

/// Prints `value` as JSON, or what `human` makes of it.
pub fn show<T: Serialize>(
    context: &Context,
    value: &T,
    human: impl FnOnce(&T) -> String,
) -> Result<ExitStatus, CliError> {
    if context.json {
        return raw(&(json(value)? + "\n"));
    }
    let text = human(value);
    if text.is_empty() { Ok(ExitStatus::OK) } else { raw(&(text + "\n")) }
}

pub fn json<T: Serialize>(value: &T) -> Result<String, CliError> {
    serde_json::to_string_pretty(value)
        .map_err(|error| CliError::failed(format!("the answer cannot be written as JSON: {error}")))
}

/// One value on one line, for streams.
pub fn json_line<T: Serialize>(value: &T) -> Result<ExitStatus, CliError> {
    let line = serde_json::to_string(value)
        .map_err(|error| CliError::failed(format!("the answer cannot be written as JSON: {error}")))?;
    raw(&(line + "\n"))
}

/// Writes to stdout. A reader that has gone (`| head`) ends the command quietly.
pub fn raw(text: &str) -> Result<ExitStatus, CliError> {
    bytes_out(text.as_bytes())
}

pub fn bytes_out(bytes: &[u8]) -> Result<ExitStatus, CliError> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(ExitStatus::OK),
        Err(error) => {
            let status = if error.kind() == std::io::ErrorKind::BrokenPipe {
                ExitStatus::BROKEN_PIPE
            } else {
                ExitStatus::FAILED
            };
            Err(CliError::Said { message: format!("cannot write the output: {error}"), status })
        }
    }
}

pub fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(comfy_table::presets::NOTHING).set_header(header);
    if let Some(column) = table.column_mut(0) {
        column.set_padding((0, 1));
    }
    table
}

/// 1536 → `1.5 KiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    // Only shown to people: what f64 loses of a size does not matter.
    #[expect(clippy::cast_precision_loss, reason = "a size for people")]
    let mut value = count as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// How far away `at` is: `5 min ago`, `in 2 h`.
pub fn relative(at: Timestamp) -> String {
    let seconds = at.as_second() - Timestamp::now().as_second();
    if seconds <= 0 { format!("{} ago", span(-seconds)) } else { format!("in {}", span(seconds)) }
}

fn span(seconds: i64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// `a=1, b=2`.
pub fn pairs(map: &std::collections::BTreeMap<String, String>) -> String {
    map.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ")
}

/// A spinner on stderr, where that is a terminal and nobody asked for JSON.
pub fn spinner(context: &Context, message: impl Into<String>) -> indicatif::ProgressBar {
    if context.json {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new_spinner();
    bar.set_message(message.into());
    bar.enable_steady_tick(std::time::Duration::from_millis(120));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_are_short() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(span(90), "90 s");
        assert_eq!(span(3600), "60 min");
        assert_eq!(span(200_000), "2 d");
    }
}

//! Lines for people, and the end of the aggregate when something is impossible.
//! Nothing is allocated: a line is built in a buffer on the stack.

use core::fmt::{self, Write};

use crate::{control, own_calls};

/// Longest line, bytes; the rest is cut off.
const LINE_BYTES_MAX: usize = 512;

/// A line under construction.
pub struct Line {
    bytes: [u8; LINE_BYTES_MAX],
    length: usize,
}

impl Line {
    /// An empty line.
    pub const fn new() -> Line {
        Line {
            bytes: [0; LINE_BYTES_MAX],
            length: 0,
        }
    }
    /// What was written, cut at a character boundary.
    pub fn as_str(&self) -> &str {
        match core::str::from_utf8(&self.bytes[..self.length]) {
            Ok(text) => text,
            Err(error) => {
                core::str::from_utf8(&self.bytes[..error.valid_up_to()]).unwrap_or_default()
            }
        }
    }
}

impl Default for Line {
    fn default() -> Line {
        Line::new()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = LINE_BYTES_MAX - self.length;
        let taken = text.len().min(room);
        self.bytes[self.length..self.length + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        Ok(())
    }
}

/// Writes one line to standard error.
pub fn line(arguments: fmt::Arguments<'_>) {
    let mut line = Line::new();
    let _ = line.write_str("weft: ");
    let _ = line.write_fmt(arguments);
    line.length = line.length.min(LINE_BYTES_MAX - 1);
    line.bytes[line.length] = b'\n';
    let _ = own_calls::write_all(2, &line.bytes[..=line.length]);
}

/// Tells the launcher (or standard error, when there is none) what went wrong
/// and ends the process with `code`.
pub fn fatal(code: i32, text: &str) -> ! {
    fail(code, format_args!("{text}"))
}

/// As [`fatal`], with a formatted sentence.
pub fn fail(code: i32, arguments: fmt::Arguments<'_>) -> ! {
    let mut sentence = Line::new();
    let _ = sentence.write_fmt(arguments);
    fail_for(0, code, sentence.as_str())
}

/// As [`fatal`], at home, for a reason that `node` gave.
pub fn fail_for(node: usize, code: i32, text: &str) -> ! {
    if !control::tell_fatal(node as u32, code, text) {
        line(format_args!("{text}"));
    }
    own_calls::exit_group(code)
}

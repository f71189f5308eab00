//! How a test says that it did not run.

use std::io::Write;

/// Says why the calling test is skipped: past the test harness, which keeps the
/// output of a test that passed to itself. `make unit` repeats these lines at its end.
pub fn skipped(why: &dyn std::fmt::Display) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("a test");
    // Nobody is left to tell when standard error is closed.
    let _ = writeln!(std::io::stderr(), "skipped: {test}: {why}");
}

//! The serial port of a slice and its console. The console is on slice 0, the port that the
//! guest uses where the platform is.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use weft_aggregate::{SerialConsole, Slice};
use weft_confine::lock;
use weft_platform::devices::serial::SerialPort;

/// What the guest wrote goes there, on whichever slice it did.
#[derive(Clone)]
pub(super) struct SharedOutput(Arc<Mutex<Box<dyn Write + Send>>>);

impl SharedOutput {
    pub fn new(output: Box<dyn Write + Send>) -> Self {
        Self(Arc::new(Mutex::new(output)))
    }
}

impl Write for SharedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(&self.0).flush()
    }
}

/// A slice's port, for the slice that has the other end.
pub(super) struct SerialEnds {
    pub port: Arc<SerialPort>,
    pub output: SharedOutput,
}

impl SerialConsole for SerialEnds {
    fn show(&self, bytes: &[u8]) {
        // The console counts what it loses.
        let _ = self.output.clone().write_all(bytes);
    }

    fn type_in(&self, bytes: &[u8]) -> usize {
        self.port.type_in(bytes)
    }
}

/// What is typed on slice 0, for the port that the guest uses.
#[derive(Clone)]
pub(super) struct SerialInput {
    pub port: Arc<SerialPort>,
    /// `None` if the machine has one slice that stays alone.
    pub slice: Option<Arc<Slice>>,
}

impl SerialInput {
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        match &self.slice {
            Some(slice) => slice.type_in(bytes, |bytes| self.port.type_in(bytes)),
            None => self.port.type_in(bytes),
        }
    }

    /// How many of these bytes a port elsewhere took; see [`Slice::typed_before`].
    pub fn typed_before(&self, bytes: &[u8]) -> Option<usize> {
        self.slice.as_ref()?.typed_before(bytes)
    }
}

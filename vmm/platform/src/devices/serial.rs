//! COM1: a 16550A (rust-vmm's `vm-superio`), with a bounded queue for what is
//! typed in.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::Write;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::{NoEvents, Serial, SerialState};

use crate::bus::BusDevice;
use crate::interrupts::InterruptLine;
use crate::part::{Part, PartError, Persist, Version};
use weft_confine::lock;

/// COM1.
pub const PORTS: Range<u64> = 0x3f8..0x400;
/// Input of the I/O APIC.
pub const PIN: usize = 4;

/// Typed bytes that wait for the guest, beside those in the FIFO.
const TYPED_MAX: usize = 4096;
/// The receive buffer, and the register that was just read.
const DATA: u64 = 0;

/// An interrupt of the UART: an edge.
struct Edge {
    line: Arc<dyn InterruptLine>,
    /// Not while a state is restored: the interrupts of that state were sent where it comes
    /// from, and are pending in its vCPUs.
    armed: Arc<AtomicBool>,
}

impl Trigger for Edge {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        if self.armed.load(Ordering::Relaxed) {
            self.line.set(true);
            self.line.set(false);
        }
        Ok(())
    }
}

/// Where the guest's bytes go, kept over a restore.
#[derive(Clone)]
struct Sink {
    /// Used under the port's lock only.
    writer: Arc<Mutex<Box<dyn Write + Send>>>,
    written: Arc<AtomicU64>,
    dropped: Arc<AtomicU64>,
}

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let counter = match lock(&self.writer).write_all(bytes) {
            Ok(()) => &self.written,
            Err(_) => &self.dropped,
        };
        counter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        // A sink that cannot be flushed has lost nothing that we could give again.
        let _ = lock(&self.writer).flush();
        Ok(())
    }
}

struct Port {
    uart: Serial<Edge, NoEvents, Sink>,
    /// Waits for room in the FIFO.
    typed: VecDeque<u8>,
    /// The machine stands: nothing is taken, since that interrupts.
    paused: bool,
}

pub struct SerialPort {
    /// The UART with its queue. The interrupt line and the sink are used under it:
    /// both only hand over.
    port: Mutex<Port>,
    line: Arc<dyn InterruptLine>,
    sink: Sink,
}

/// The UART's registers and what is typed ahead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SerialPortState {
    version: Version<1>,
    divisor: [u8; 2],
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    received: Vec<u8>,
    typed: Vec<u8>,
}

impl SerialPort {
    /// Interrupts by `line`; what the guest writes goes to `writer`, byte by byte
    /// and on a vCPU's thread, so it must be quick.
    pub fn new(line: Arc<dyn InterruptLine>, writer: Box<dyn Write + Send>) -> Self {
        let sink = Sink {
            writer: Arc::new(Mutex::new(writer)),
            written: Arc::default(),
            dropped: Arc::default(),
        };
        let edge = Edge {
            line: line.clone(),
            armed: Arc::new(AtomicBool::new(true)),
        };
        let uart = Serial::new(edge, sink.clone());
        Self {
            port: Mutex::new(Port {
                uart,
                typed: VecDeque::new(),
                paused: false,
            }),
            line,
            sink,
        }
    }

    /// Types into it; says how many bytes were taken: none while the machine
    /// stands, or while a vCPU is in the port. Never waits: that vCPU may wait
    /// for the caller to take what the guest wrote.
    pub fn type_in(&self, bytes: &[u8]) -> usize {
        let mut port = match self.port.try_lock() {
            Ok(port) => port,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return 0,
        };
        if port.paused {
            return 0;
        }
        let taken = bytes.len().min(TYPED_MAX - port.typed.len());
        port.typed.extend(&bytes[..taken]);
        port.refill();
        taken
    }
}

impl Port {
    /// Moves typed bytes to the FIFO.
    fn refill(&mut self) {
        let room = self.uart.fifo_capacity().min(self.typed.len());
        if room == 0 {
            return;
        }
        let bytes: Vec<u8> = self.typed.iter().take(room).copied().collect();
        // None are taken in loop mode: they stay.
        if let Ok(taken) = self.uart.enqueue_raw_bytes(&bytes) {
            self.typed.drain(..taken);
        }
    }
}

impl BusDevice for SerialPort {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let [byte] = data else {
            data.fill(0xff);
            return;
        };
        let mut port = lock(&self.port);
        *byte = port.uart.read(offset as u8);
        if offset == DATA {
            port.refill();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let [byte] = data {
            // Neither output nor interrupt can fail.
            let _ = lock(&self.port).uart.write(offset as u8, *byte);
        }
    }
}

impl Part for SerialPort {
    fn pause(&self) -> Result<(), PartError> {
        lock(&self.port).paused = true;
        Ok(())
    }

    fn resume(&self) -> Result<(), PartError> {
        lock(&self.port).paused = false;
        Ok(())
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        vec![
            ("bytes-out", count(&self.sink.written)),
            ("bytes-dropped", count(&self.sink.dropped)),
        ]
    }
}

impl Persist for SerialPort {
    type State = SerialPortState;

    fn save(&self) -> Result<SerialPortState, PartError> {
        let port = lock(&self.port);
        let state = port.uart.state();
        Ok(SerialPortState {
            version: Version,
            divisor: [state.baud_divisor_low, state.baud_divisor_high],
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            received: state.in_buffer,
            typed: port.typed.iter().copied().collect(),
        })
    }

    fn restore(&self, saved: &SerialPortState) -> Result<(), PartError> {
        if saved.typed.len() > TYPED_MAX {
            let what = format!("{} typed bytes", saved.typed.len());
            return Err(PartError::Misfit(what));
        }
        let state = SerialState {
            baud_divisor_low: saved.divisor[0],
            baud_divisor_high: saved.divisor[1],
            interrupt_enable: saved.interrupt_enable,
            interrupt_identification: saved.interrupt_identification,
            line_control: saved.line_control,
            line_status: saved.line_status,
            modem_control: saved.modem_control,
            modem_status: saved.modem_status,
            scratch: saved.scratch,
            in_buffer: saved.received.clone(),
        };
        let armed = Arc::<AtomicBool>::default();
        let edge = Edge {
            line: self.line.clone(),
            armed: armed.clone(),
        };
        let uart = Serial::from_state(&state, edge, NoEvents, self.sink.clone())
            .map_err(|error| PartError::Misfit(format!("serial port: {error:?}")))?;
        armed.store(true, Ordering::Relaxed);
        let mut port = lock(&self.port);
        port.uart = uart;
        port.typed = saved.typed.iter().copied().collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[derive(Default)]
    struct Line(AtomicU32);

    impl InterruptLine for Line {
        fn set(&self, high: bool) {
            self.0.fetch_add(u32::from(high), Ordering::Relaxed);
        }
    }

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn rig() -> (SerialPort, Arc<Line>, Kept) {
        let (line, kept) = (Arc::new(Line::default()), Kept::default());
        let port = SerialPort::new(line.clone(), Box::new(kept.clone()));
        (port, line, kept)
    }

    fn read(port: &SerialPort, offset: u64) -> u8 {
        let mut data = [0];
        port.read(offset, &mut data);
        data[0]
    }

    #[test]
    fn output_comes_out_and_input_goes_in_by_interrupt() {
        let (port, line, kept) = rig();
        for byte in b"hi\n" {
            port.write(0, &[*byte]);
        }
        assert_eq!(*kept.0.lock().unwrap(), b"hi\n");
        assert_eq!(line.0.load(Ordering::Relaxed), 0);
        port.write(1, &[1]);
        assert_eq!(port.type_in(b"x"), 1);
        assert_eq!(line.0.load(Ordering::Relaxed), 1);
        assert_eq!(read(&port, 5) & 1, 1);
        assert_eq!(read(&port, 0), b'x');
        assert_eq!(read(&port, 5) & 1, 0);
    }

    #[test]
    fn what_is_typed_ahead_is_bounded_and_keeps_its_order() {
        let (port, ..) = rig();
        let text: Vec<u8> = (0..10_000_u32).map(|n| (n % 251) as u8).collect();
        let mut taken = port.type_in(&text);
        assert!((TYPED_MAX..TYPED_MAX + 100).contains(&taken), "{taken}");
        let mut seen = Vec::new();
        while seen.len() < text.len() {
            assert_eq!(read(&port, 5) & 1, 1);
            seen.push(read(&port, 0));
            taken += port.type_in(&text[taken..]);
        }
        assert_eq!(seen, text);
    }

    #[test]
    fn nothing_is_taken_while_it_stands() {
        let (port, line, _) = rig();
        port.write(1, &[1]);
        port.pause().unwrap();
        let before = Persist::save(&port).unwrap();
        assert_eq!(port.type_in(b"x"), 0);
        Persist::restore(&port, &before).unwrap();
        assert_eq!(port.type_in(b"x"), 0);
        assert_eq!(Persist::save(&port).unwrap(), before);
        assert_eq!(line.0.load(Ordering::Relaxed), 0);
        port.resume().unwrap();
        assert_eq!(port.type_in(b"x"), 1);
        assert_eq!(line.0.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn who_types_does_not_wait_for_who_writes() {
        /// Waits until somebody takes what is written.
        struct Slow(std::sync::mpsc::SyncSender<u8>);
        impl Write for Slow {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                for byte in bytes {
                    let _ = self.0.send(*byte);
                }
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (writer, written) = std::sync::mpsc::sync_channel(0);
        let port = SerialPort::new(Arc::new(Line::default()), Box::new(Slow(writer)));
        std::thread::scope(|scope| {
            scope.spawn(|| port.write(0, b"o"));
            while port.port.try_lock().is_ok() {
                std::thread::yield_now();
            }
            assert_eq!(port.type_in(b"i"), 0);
            assert_eq!(written.recv(), Ok(b'o'));
        });
        assert_eq!(port.type_in(b"i"), 1);
    }

    #[test]
    fn its_state_goes_elsewhere() {
        let (port, ..) = rig();
        port.write(7, &[0x5a]);
        port.write(1, &[3]);
        port.type_in(&[b'y'; 100]);
        let state = Persist::save(&port).unwrap();
        let (other, line, _) = rig();
        Persist::restore(&other, &state).unwrap();
        assert_eq!(read(&other, 7), 0x5a);
        // Its interrupts were sent already.
        assert_eq!(line.0.load(Ordering::Relaxed), 0);
        for _ in 0..100 {
            assert_eq!(read(&other, 0), b'y');
        }
        assert!(line.0.load(Ordering::Relaxed) > 0);
        assert_eq!(read(&other, 5) & 1, 0);
        let mut long = state;
        long.typed = vec![0; TYPED_MAX + 1];
        assert!(Persist::restore(&other, &long).is_err());
    }

    #[test]
    fn no_access_panics() {
        let (port, ..) = rig();
        for offset in 0..8 {
            for value in 0..=255 {
                port.write(offset, &[value]);
                read(&port, offset);
            }
            port.write(offset, &[0; 4]);
            port.read(offset, &mut [0; 4]);
        }
    }
}

//! Where a guest's bytes wait for the thread that writes them out, so that a
//! slow terminal or file does not hold up a vCPU.

use std::io::Write;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::lock;
use crate::confine::{self, ThreadKind};

/// Bytes that may wait. A guest that writes faster waits itself.
const BYTES_MAX: usize = 64 << 10;
/// Longest that a vCPU waits for room; then its bytes are dropped.
const ROOM_WAIT: Duration = Duration::from_secs(1);
/// How long the end of a line is waited for before part of one is written.
const LINE_WAIT: Duration = Duration::from_millis(2);

#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    /// The thread took some and has not written them all.
    writing: bool,
    over: bool,
    dropped: u64,
    written: u64,
}

#[derive(Default)]
struct Shared {
    /// Never held while bytes are written out.
    queue: Mutex<Queue>,
    /// There are bytes, or a whole line, or it is over.
    filled: Condvar,
    /// There is room, or nothing is left.
    emptied: Condvar,
}

/// The way in. Clones lead to the same thread.
#[derive(Clone)]
pub struct Output {
    shared: Arc<Shared>,
}

/// The thread, and the way to end it.
pub struct OutputThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Starts the thread `weft-output`, which writes to `sink`.
pub fn start(sink: Box<dyn Write + Send>) -> std::io::Result<(Output, OutputThread)> {
    let shared = Arc::<Shared>::default();
    let work = shared.clone();
    let thread = std::thread::Builder::new()
        .name("weft-output".into())
        .spawn(move || work.run(sink))?;
    let output = Output {
        shared: shared.clone(),
    };
    let thread = Some(thread);
    Ok((output, OutputThread { shared, thread }))
}

impl Output {
    /// Takes all of `bytes`; waits for room, but not for ever.
    pub fn write(&self, bytes: &[u8]) {
        let mut queue = lock(&self.shared.queue);
        if queue.bytes.len() + bytes.len() > BYTES_MAX {
            let full = |queue: &mut Queue| queue.bytes.len() + bytes.len() > BYTES_MAX;
            queue = self
                .shared
                .emptied
                .wait_timeout_while(queue, ROOM_WAIT, full)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
            if queue.bytes.len() + bytes.len() > BYTES_MAX {
                queue.dropped += bytes.len() as u64;
                return;
            }
        }
        let tell = queue.bytes.is_empty() || bytes.contains(&b'\n');
        queue.bytes.extend_from_slice(bytes);
        if tell {
            self.shared.filled.notify_one();
        }
    }

    /// Waits until all is written out, `patience` at most.
    pub fn drain(&self, patience: Duration) {
        let queue = lock(&self.shared.queue);
        let busy = |queue: &mut Queue| !queue.bytes.is_empty() || queue.writing;
        self.shared.filled.notify_one();
        drop(
            self.shared
                .emptied
                .wait_timeout_while(queue, patience, busy),
        );
    }

    /// Bytes written out, and bytes dropped since nobody took them.
    pub fn counts(&self) -> (u64, u64) {
        let queue = lock(&self.shared.queue);
        (queue.written, queue.dropped)
    }
}

impl Drop for OutputThread {
    fn drop(&mut self) {
        lock(&self.shared.queue).over = true;
        self.shared.filled.notify_one();
        let deadline = Instant::now() + ROOM_WAIT;
        let Some(thread) = self.thread.take() else {
            return;
        };
        // A sink that blocks for ever must not hold up the end of the machine.
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(200));
        }
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self, mut sink: Box<dyn Write + Send>) {
        confine::enter_or_abort(ThreadKind::Console);
        while let Some(bytes) = self.next() {
            let taken = bytes.len() as u64;
            let outcome = sink.write_all(&bytes).and_then(|()| sink.flush());
            let mut queue = lock(&self.queue);
            queue.writing = false;
            match outcome {
                Ok(()) => queue.written += taken,
                Err(_) => queue.dropped += taken,
            }
            self.emptied.notify_all();
        }
    }

    /// The next bytes: a line or more, or what there is after [`LINE_WAIT`].
    fn next(&self) -> Option<Vec<u8>> {
        let mut queue = lock(&self.queue);
        while queue.bytes.is_empty() {
            if queue.over {
                return None;
            }
            queue = self
                .filled
                .wait(queue)
                .unwrap_or_else(|poison| poison.into_inner());
        }
        if !queue.bytes.contains(&b'\n') && !queue.over {
            queue = self
                .filled
                .wait_timeout(queue, LINE_WAIT)
                .unwrap_or_else(|poison| poison.into_inner())
                .0;
        }
        queue.writing = true;
        let bytes = std::mem::take(&mut queue.bytes);
        self.emptied.notify_all();
        Some(bytes)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Keeps what is written.
    #[derive(Clone, Default)]
    pub(crate) struct Kept(pub Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn all_bytes_come_out_in_order() {
        let kept = Kept::default();
        let (output, thread) = start(Box::new(kept.clone())).unwrap();
        let mut expected = Vec::new();
        for number in 0..20_000_u32 {
            let text = format!("{number}{}", if number % 7 == 0 { "\n" } else { " " });
            output.write(text.as_bytes());
            expected.extend_from_slice(text.as_bytes());
        }
        output.drain(Duration::from_secs(10));
        assert_eq!(output.counts(), (expected.len() as u64, 0));
        drop(thread);
        assert_eq!(*lock(&kept.0), expected);
    }

    #[test]
    fn the_last_bytes_come_out_at_the_end() {
        let kept = Kept::default();
        let (output, thread) = start(Box::new(kept.clone())).unwrap();
        output.write(b"login: ");
        drop(thread);
        assert_eq!(*lock(&kept.0), b"login: ");
    }

    #[test]
    fn a_sink_that_fails_costs_its_bytes_and_no_more() {
        struct Broken;
        impl Write for Broken {
            fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
                Err(std::io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let (output, _thread) = start(Box::new(Broken)).unwrap();
        output.write(b"abc\n");
        output.drain(Duration::from_secs(10));
        assert_eq!(output.counts(), (0, 4));
    }
}

//! The connection of a machine: frames after their lengths, both ways.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::unix::net::UnixStream;

use crate::core::{PortId, Switch};
use crate::frames::{FRAME_MAX, LENGTH, Way, first};

/// Bytes that are read at once.
pub const INPUT: usize = 4 * FRAME_MAX;
/// Frames that are written at once.
const OUTPUT: usize = 64;
/// Frames of the input that are passed on before the output goes: fewer than wait at a port.
pub const BATCH: usize = 256;

/// Its socket, and what is between that and the core.
pub struct Machine {
    socket: UnixStream,
    input: Box<[u8]>,
    /// What of `input` was read and not yet passed on.
    start: usize,
    end: usize,
    /// The rest of a frame that went out in part: less than one frame.
    rest: Vec<u8>,
    /// The socket takes nothing for now.
    pub blocked: bool,
}

impl Machine {
    /// Over a socket that is connected.
    ///
    /// # Errors
    /// It cannot be made not to wait.
    pub fn new(socket: UnixStream) -> io::Result<Machine> {
        socket.set_nonblocking(true)?;
        Ok(Machine {
            socket,
            input: vec![0; INPUT].into(),
            start: 0,
            end: 0,
            rest: Vec::new(),
            blocked: false,
        })
    }

    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Whether something waits that is not in the core any more.
    pub fn has_rest(&self) -> bool {
        !self.rest.is_empty()
    }

    /// Reads once.
    ///
    /// # Errors
    /// It is closed, or fails.
    pub fn fill(&mut self) -> io::Result<()> {
        self.input.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match self.socket.read(&mut self.input[self.end..]) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => {
                self.end += count;
                Ok(())
            }
            Err(error) if is_wait(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Passes up to [`BATCH`] frames on; whether there are more.
    ///
    /// # Errors
    /// A length that no frame has.
    pub fn pass_on(&mut self, port: PortId, switch: &mut Switch, now: u64) -> io::Result<bool> {
        for _ in 0..BATCH {
            let found = first(&self.input[self.start..self.end])
                .map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            let Some(frame) = found else {
                return Ok(false);
            };
            switch.receive(port, frame, Way::Directed, now);
            self.start += LENGTH + frame.len();
        }
        Ok(true)
    }

    /// Writes what waits, as far as the socket takes it. What it does not take stays in the
    /// core, since it may have to follow the machine.
    ///
    /// # Errors
    /// It is closed, or fails.
    pub fn flush(&mut self, port: PortId, switch: &mut Switch, now: u64) -> io::Result<()> {
        self.blocked = false;
        loop {
            // A frame that went out in part is ended before another begins: the socket may
            // have room again by now.
            while !self.rest.is_empty() {
                match self.socket.write(&self.rest) {
                    Ok(count) => drop(self.rest.drain(..count)),
                    Err(error) => return self.wait(error),
                }
            }
            if !switch.has_output(port) {
                return Ok(());
            }
            let sent = {
                let frames: Vec<&[u8]> = switch.waiting(port).take(OUTPUT).collect();
                let length = |frame: &&[u8]| (frame.len() as u32).to_be_bytes();
                let lengths: Vec<[u8; LENGTH]> = frames.iter().map(length).collect();
                let pieces = lengths.iter().zip(&frames);
                let pieces = pieces.flat_map(|(length, frame)| [&length[..], *frame]);
                let pieces: Vec<IoSlice<'_>> = pieces.map(IoSlice::new).collect();
                self.socket.write_vectored(&pieces)
            };
            match sent {
                Ok(count) => self.take_off(count, port, switch, now),
                Err(error) => return self.wait(error),
            }
        }
    }

    /// Takes the frames off that these bytes, with their lengths, were; a frame that went in part
    /// leaves its rest.
    fn take_off(&mut self, mut sent: usize, port: PortId, switch: &mut Switch, now: u64) {
        while sent > 0
            && let Some(outgoing) = switch.next(port, now)
        {
            let mut whole = Vec::new();
            outgoing.write(&mut whole);
            self.rest.extend(whole.get(sent..).unwrap_or_default());
            sent = sent.saturating_sub(whole.len());
        }
    }

    fn wait(&mut self, error: io::Error) -> io::Result<()> {
        if error.kind() == ErrorKind::Interrupted {
            return Ok(());
        }
        self.blocked = error.kind() == ErrorKind::WouldBlock;
        match self.blocked {
            true => Ok(()),
            false => Err(error),
        }
    }
}

/// Whether to try again later.
pub fn is_wait(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: u32 = 20_000;

    fn frame(number: u32) -> Vec<u8> {
        let mut frame = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0].to_vec();
        frame.resize(14 + number as usize % 60_000, number as u8);
        frame.extend(number.to_be_bytes());
        frame
    }

    /// Its socket is full again and again, and has room again before a write that follows.
    #[test]
    fn frames_stay_whole_while_the_machine_reads() {
        let mut switch = Switch::default();
        let sender = switch.add_machine().unwrap();
        let receiver = switch.add_machine().unwrap();
        let hello = [&[0xff; 6][..], &[2, 0, 0, 0, 0, 2, 8, 0]].concat();
        switch.receive(receiver, &hello, Way::Directed, 0);
        let (near, mut far) = UnixStream::pair().unwrap();
        let mut machine = Machine::new(near).unwrap();
        let reader = std::thread::spawn(move || {
            for number in 0..FRAMES {
                let mut length = [0; LENGTH];
                far.read_exact(&mut length).unwrap();
                let mut found = vec![0; u32::from_be_bytes(length) as usize];
                far.read_exact(&mut found).unwrap();
                assert!(found == frame(number), "frame {number} is not whole");
            }
        });
        let mut number = 0;
        while !reader.is_finished() {
            while number < FRAMES && switch.waiting(receiver).count() < 100 {
                switch.receive(sender, &frame(number), Way::Directed, 0);
                number += 1;
            }
            if let Err(error) = machine.flush(receiver, &mut switch, 0) {
                assert!(reader.is_finished() || number == FRAMES, "{error}");
            }
        }
        reader.join().unwrap();
    }
}

//! A client that has not asked yet, and what it asks.

use std::io::{self, Read, Write};
use std::net::SocketAddrV4;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::card::is_wait;
use crate::{ASK_MAX, LINE_MAX, PATIENCE_MAX};

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub to: SocketAddrV4,
    /// How long the machine may take to answer.
    pub patience: Duration,
    /// What followed the line: the first bytes of the connection.
    pub early: Vec<u8>,
}

/// Reads what a client has sent up to now: `None` while the line is not whole.
///
/// # Errors
/// What is wrong with it.
pub fn parse(bytes: &[u8]) -> Result<Option<Request>, String> {
    let line = &bytes[..bytes.len().min(LINE_MAX)];
    let Some(length) = line.iter().position(|byte| *byte == b'\n') else {
        return match bytes.len() < LINE_MAX {
            true => Ok(None),
            false => Err(format!(
                "the first line is longer than {LINE_MAX} bytes: ask with ADDRESS:PORT MILLISECONDS"
            )),
        };
    };
    let wrong =
        || "the first line is not understood: ask with ADDRESS:PORT MILLISECONDS".to_owned();
    let text = std::str::from_utf8(&line[..length]).map_err(|_| wrong())?;
    let (to, patience) = text.split_once(' ').ok_or_else(wrong)?;
    let to: SocketAddrV4 = to.parse().map_err(|_| wrong())?;
    let milliseconds: u32 = patience.parse().map_err(|_| wrong())?;
    let patience = Duration::from_millis(milliseconds.into());
    if patience > PATIENCE_MAX {
        let most = PATIENCE_MAX.as_millis();
        return Err(format!(
            "{milliseconds} ms is more than the {most} ms that a client may wait: give less"
        ));
    }
    let early = bytes[length + 1..].to_vec();
    Ok(Some(Request {
        to,
        patience,
        early,
    }))
}

/// The client's socket, and what was read of its line.
pub struct Caller {
    pub client: UnixStream,
    /// It is turned away then.
    pub until: Instant,
    bytes: Vec<u8>,
}

impl Caller {
    /// Over a socket that does not wait.
    pub fn new(client: UnixStream, now: Instant) -> Caller {
        Caller {
            client,
            until: now + ASK_MAX,
            bytes: Vec::new(),
        }
    }

    /// Reads once: what is asked, `None` while that is not whole.
    ///
    /// # Errors
    /// What is wrong with it, for the client.
    pub fn read(&mut self) -> Result<Option<Request>, String> {
        let mut bytes = [0; LINE_MAX];
        match self.client.read(&mut bytes) {
            Ok(0) => Err("the line does not end: write it whole".into()),
            Ok(count) => {
                self.bytes.extend_from_slice(&bytes[..count]);
                parse(&self.bytes)
            }
            Err(error) if is_wait(&error) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Says why there is no connection. A client that does not read is not waited for.
pub fn refuse(mut client: &UnixStream, why: &str) {
    let _ = client.write_all(format!("error {why}\n").as_bytes());
}

/// Says that the connection is there.
///
/// # Errors
/// The client has gone.
pub fn welcome(mut client: &UnixStream) -> io::Result<()> {
    client.write_all(b"ok\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_whole_and_what_follows_is_kept() {
        let line = b"10.77.0.1:22 10000\nSSH";
        for length in 0..19 {
            assert_eq!(parse(&line[..length]), Ok(None));
        }
        let request = Request {
            to: "10.77.0.1:22".parse().unwrap(),
            patience: Duration::from_secs(10),
            early: b"SSH".to_vec(),
        };
        assert_eq!(parse(line), Ok(Some(request)));
    }

    #[test]
    fn what_is_no_request_says_why() {
        let said = |bytes: &[u8]| parse(bytes).unwrap_err();
        assert!(said(&[b'1'; LINE_MAX]).contains("longer than 64 bytes"));
        assert!(said(&[&[b'1'; LINE_MAX][..], b"\n"].concat()).contains("longer"));
        for line in [
            &b"\n"[..],
            b"10.77.0.1:22\n",
            b"10.77.0.1 1\n",
            b"host:22 1\n",
            b"10.77.0.1:22 -1\n",
            b"10.77.0.1:22  1\n",
            b"10.77.0.1:99999 1\n",
            b"\xff\xfe \n",
            b"[::1]:22 1\n",
        ] {
            assert!(said(line).contains("not understood"), "{line:?}");
        }
        assert!(said(b"10.77.0.1:22 600001\n").contains("600000 ms"));
    }
}

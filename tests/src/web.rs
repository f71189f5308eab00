//! Files by HTTP, to a guest and from one, over one connection each.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

/// The body of `/file` from the server at this port of the host; `bound`: how long
/// nothing may come.
pub fn fetch(port: u16, bound: Duration) -> Result<Vec<u8>> {
    fetch_from(SocketAddr::from((Ipv4Addr::LOCALHOST, port)), bound)
}

/// The same from any server.
pub fn fetch_from(server: SocketAddr, bound: Duration) -> Result<Vec<u8>> {
    let mut connection = TcpStream::connect_timeout(&server, bound)?;
    connection.set_read_timeout(Some(bound))?;
    connection.write_all(b"GET /file HTTP/1.0\r\n\r\n")?;
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer)?;
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n");
    Ok(answer.split_off(end.context("no answer from the guest")? + 4))
}

/// Gives the first client these bytes, whatever it asks for; `midway` runs when half of
/// them are written. `bound`: how long the client may take to come, and to take the
/// next ones.
pub fn give(
    listener: &TcpListener,
    content: &[u8],
    bound: Duration,
    midway: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut client = accept(listener, bound)?;
    client.set_write_timeout(Some(bound))?;
    client.set_read_timeout(Some(bound))?;
    let mut request = Vec::new();
    let mut byte = [0];
    while !request.ends_with(b"\r\n\r\n") {
        client.read_exact(&mut byte).with_context(|| {
            let request = String::from_utf8_lossy(&request);
            format!("the client went after {request:?} of its request")
        })?;
        request.extend(byte);
    }
    let length = content.len();
    client.write_all(format!("HTTP/1.0 200 OK\r\nContent-Length: {length}\r\n\r\n").as_bytes())?;
    let (first, second) = content.split_at(length / 2);
    client.write_all(first)?;
    midway()?;
    client.write_all(second)?;
    Ok(())
}

fn accept(listener: &TcpListener, bound: Duration) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + bound;
    loop {
        match listener.accept() {
            Ok((client, _)) => {
                client.set_nonblocking(false)?;
                return Ok(client);
            }
            Err(error) => ensure!(
                Instant::now() < deadline,
                "the guest does not come: {error}"
            ),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    #[test]
    fn a_client_that_asks_for_nothing_is_told_from_a_guest_without_a_network() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(b"GET ").unwrap();
        drop(client);
        let given = give(&listener, b"content", BOUND, || Ok(()));
        let why = format!("{:#}", given.unwrap_err());
        assert!(why.contains("went after \"GET \" of its request"), "{why}");
    }

    #[test]
    fn what_is_given_is_fetched_and_midway_comes_before_the_second_half() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let content: Vec<u8> = (0..300_000_u32).map(|number| number as u8).collect();
        std::thread::scope(|scope| {
            let fetched = scope.spawn(|| fetch(port, BOUND).unwrap());
            let mut between = false;
            give(&listener, &content, BOUND, || {
                std::thread::sleep(Duration::from_millis(20));
                between = !fetched.is_finished();
                Ok(())
            })
            .unwrap();
            assert!(between);
            assert_eq!(fetched.join().unwrap(), content);
        });
    }
}

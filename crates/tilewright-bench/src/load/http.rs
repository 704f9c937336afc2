//! As much of an HTTP/1.1 client as a load tool needs: kept connections, whole answers, deadlines.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tilewright_core::{Error, Result};

/// How long a read may wait before deadline and Ctrl-C are looked at.
const SLICE: Duration = Duration::from_millis(50);
/// After Ctrl-C an answer that is on its way gets this long.
const GRACE: Duration = Duration::from_secs(2);
/// A head of an answer is not longer.
const MAX_HEAD: usize = 64 << 10;
/// Of a body so much is kept, for error messages; the rest is only counted.
const KEPT: usize = 4 << 10;

/// Where requests go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// As it was given.
    pub url: String,
    /// `host:port`, for the Host header.
    pub authority: String,
    /// Path and query.
    pub path: String,
    addresses: Vec<SocketAddr>,
}

impl Target {
    /// Reads `http://host:port/path` and asks for the host's addresses once.
    pub fn parse(url: &str) -> Result<Target> {
        let bad =
            |what: &str| Error::config(format!("`{url}` {what}"), "write it as http://127.0.0.1:8000/v1/systemone");
        let rest = url.strip_prefix("http://").ok_or_else(|| {
            bad(if url.starts_with("https://") {
                "wants TLS, which this client does not speak: give the address behind the proxy"
            } else {
                "does not begin with http://"
            })
        })?;
        let (authority, path) = rest.find(['/', '?']).map_or((rest, "/"), |at| rest.split_at(at));
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let path = path.split('#').next().unwrap_or_default().to_owned();
        if authority.is_empty() || authority.contains('@') || url.bytes().any(|b| b <= b' ' || b >= 127) {
            return Err(bad("names no plain host, or holds blanks or a password"));
        }
        let end = authority.rfind(']').map_or(0, |at| at + 1);
        let with_port = if authority[end..].contains(':') { authority.to_owned() } else { format!("{authority}:80") };
        let addresses: Vec<SocketAddr> =
            with_port.to_socket_addrs().map_err(|e| bad(&format!("cannot be looked up: {e}")))?.collect();
        if addresses.is_empty() {
            return Err(bad("has no address"));
        }
        Ok(Target { url: url.to_owned(), authority: authority.to_owned(), path, addresses })
    }
}

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// No connection.
    Connect,
    /// No whole answer in time.
    Timeout,
    /// The connection ended before the answer did.
    Closed,
    /// What came is not HTTP/1.1.
    Garbage,
    /// Given up after Ctrl-C.
    Interrupted,
}

impl Failure {
    /// As in records.
    pub fn name(self) -> &'static str {
        match self {
            Failure::Connect => "connect",
            Failure::Timeout => "timeout",
            Failure::Closed => "closed",
            Failure::Garbage => "garbage",
            Failure::Interrupted => "interrupted",
        }
    }
}

/// An answer; its beginning is in [`Connection::body`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reply {
    /// 200, 503 and so on.
    pub status: u16,
    /// Of the body.
    pub bytes: u64,
}

/// One connection, made when needed and kept while the server keeps it.
#[derive(Debug)]
pub struct Connection<'a> {
    target: &'a Target,
    headers: String,
    stream: Option<TcpStream>,
    /// Read, but not yet looked at: `buffer[used..]`.
    buffer: Vec<u8>,
    used: usize,
    /// The first bytes of the last answer's body.
    pub body: Vec<u8>,
    /// Connections made so far.
    pub connected: u64,
}

/// Until when one exchange may take.
struct Limit<'a> {
    deadline: Instant,
    stop: &'a AtomicBool,
    stopped: Option<Instant>,
}

impl Limit<'_> {
    fn check(&mut self) -> std::result::Result<(), Failure> {
        let now = Instant::now();
        if now >= self.deadline {
            return Err(Failure::Timeout);
        }
        if self.stop.load(Ordering::Relaxed) && now.duration_since(*self.stopped.get_or_insert(now)) >= GRACE {
            return Err(Failure::Interrupted);
        }
        Ok(())
    }
}

impl<'a> Connection<'a> {
    /// Nothing is connected yet. `headers` are whole lines, each with its end.
    pub fn new(target: &'a Target, headers: &str) -> Connection<'a> {
        let headers = format!("Host: {}\r\nContent-Type: application/json\r\n{headers}", target.authority);
        Connection { target, headers, stream: None, buffer: Vec::new(), used: 0, body: Vec::new(), connected: 0 }
    }

    /// Posts a body and reads the whole answer.
    pub fn post(
        &mut self,
        path: Option<&str>,
        body: &[u8],
        timeout: Duration,
        stop: &AtomicBool,
    ) -> std::result::Result<Reply, Failure> {
        let mut limit = Limit { deadline: Instant::now() + timeout, stop, stopped: None };
        let path = path.unwrap_or(&self.target.path);
        let mut message =
            format!("POST {path} HTTP/1.1\r\n{}Content-Length: {}\r\n\r\n", self.headers, body.len()).into_bytes();
        message.extend_from_slice(body);
        let kept = self.stream.is_some();
        let mut result = self.exchange(&message, &mut limit);
        // A server may end an idle connection at any time; nobody saw this request, so it is sent again on a new one.
        if kept && matches!(result, Err((Failure::Closed, true))) {
            self.stream = None;
            result = self.exchange(&message, &mut limit);
        }
        result.map_err(|(failure, _)| {
            self.stream = None;
            failure
        })
    }

    /// The flag of an error: whether not a byte of an answer had come.
    fn exchange(&mut self, message: &[u8], limit: &mut Limit) -> std::result::Result<Reply, (Failure, bool)> {
        self.buffer.clear();
        self.used = 0;
        self.body.clear();
        if self.stream.is_none() {
            self.stream = Some(self.connect(limit).map_err(|f| (f, false))?);
        }
        // A server may answer 413 before it has read everything: what it said counts, not the broken pipe.
        let written = self.write(message, limit);
        if let Err(failure @ (Failure::Timeout | Failure::Interrupted)) = written {
            return Err((failure, false));
        }
        let reply = self.read_reply(limit).map_err(|f| (f, self.buffer.is_empty()))?;
        if written.is_err() {
            self.stream = None;
        }
        Ok(reply)
    }

    fn connect(&mut self, limit: &mut Limit) -> std::result::Result<TcpStream, Failure> {
        for address in &self.target.addresses {
            let left = limit.deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            if let Ok(stream) = TcpStream::connect_timeout(address, left.min(Duration::from_secs(5))) {
                let set = stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(SLICE)));
                if set.and_then(|()| stream.set_write_timeout(Some(SLICE))).is_ok() {
                    self.connected += 1;
                    return Ok(stream);
                }
            }
            limit.check()?;
        }
        Err(Failure::Connect)
    }

    fn write(&mut self, mut message: &[u8], limit: &mut Limit) -> std::result::Result<(), Failure> {
        let stream = self.stream.as_mut().ok_or(Failure::Closed)?;
        while !message.is_empty() {
            match stream.write(message) {
                Ok(0) => return Err(Failure::Closed),
                Ok(n) => message = &message[n..],
                Err(e) if is_wait(&e) => limit.check()?,
                Err(_) => return Err(Failure::Closed),
            }
        }
        Ok(())
    }

    /// Reads some more bytes; `false` at the end of the connection.
    fn fill(&mut self, limit: &mut Limit) -> std::result::Result<bool, Failure> {
        let stream = self.stream.as_mut().ok_or(Failure::Closed)?;
        let mut chunk = [0; 16 << 10];
        loop {
            match stream.read(&mut chunk) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.buffer.extend_from_slice(&chunk[..n]);
                    return Ok(true);
                }
                Err(e) if is_wait(&e) => limit.check()?,
                Err(_) => return Err(Failure::Closed),
            }
        }
    }

    fn need(&mut self, limit: &mut Limit) -> std::result::Result<(), Failure> {
        if self.fill(limit)? { Ok(()) } else { Err(Failure::Closed) }
    }

    fn read_reply(&mut self, limit: &mut Limit) -> std::result::Result<Reply, Failure> {
        loop {
            let head = self.read_head(limit)?;
            if head.status < 200 {
                continue;
            }
            let bytes = match head.length {
                _ if head.status == 204 || head.status == 304 => 0,
                Length::Chunked => self.read_chunks(limit)?,
                Length::Known(n) => self.read_body(n, limit)?,
                Length::UntilEnd => self.read_to_end(limit)?,
            };
            if head.close || matches!(head.length, Length::UntilEnd) {
                self.stream = None;
            }
            return Ok(Reply { status: head.status, bytes });
        }
    }

    fn read_head(&mut self, limit: &mut Limit) -> std::result::Result<Head, Failure> {
        let end = loop {
            if let Some(at) = find(&self.buffer[self.used..], b"\r\n\r\n") {
                break self.used + at;
            }
            if self.buffer.len() - self.used > MAX_HEAD {
                return Err(Failure::Garbage);
            }
            self.need(limit)?;
        };
        let head = parse_head(&self.buffer[self.used..end]).ok_or(Failure::Garbage)?;
        self.used = end + 4;
        Ok(head)
    }

    /// Keeps the beginning of the next `n` bytes of the buffer and passes over them.
    fn take(&mut self, n: usize) {
        let room = KEPT.saturating_sub(self.body.len()).min(n);
        self.body.extend_from_slice(&self.buffer[self.used..self.used + room]);
        self.used += n;
        if self.used == self.buffer.len() {
            // One byte stays, so that an empty buffer still means that nothing came.
            self.buffer.truncate(1);
            self.used = self.buffer.len();
        }
    }

    fn read_body(&mut self, length: u64, limit: &mut Limit) -> std::result::Result<u64, Failure> {
        let mut left = length;
        while left > 0 {
            let here = ((self.buffer.len() - self.used) as u64).min(left);
            if here == 0 {
                self.need(limit)?;
                continue;
            }
            self.take(here as usize);
            left -= here;
        }
        Ok(length)
    }

    fn read_to_end(&mut self, limit: &mut Limit) -> std::result::Result<u64, Failure> {
        let mut total = 0;
        loop {
            let here = self.buffer.len() - self.used;
            total += here as u64;
            self.take(here);
            if !self.fill(limit)? {
                return Ok(total);
            }
        }
    }

    fn read_line(&mut self, limit: &mut Limit) -> std::result::Result<String, Failure> {
        loop {
            if let Some(at) = find(&self.buffer[self.used..], b"\r\n") {
                let line = String::from_utf8_lossy(&self.buffer[self.used..self.used + at]).into_owned();
                self.used += at + 2;
                return Ok(line);
            }
            if self.buffer.len() - self.used > MAX_HEAD {
                return Err(Failure::Garbage);
            }
            self.need(limit)?;
        }
    }

    fn read_chunks(&mut self, limit: &mut Limit) -> std::result::Result<u64, Failure> {
        let mut total = 0;
        loop {
            let line = self.read_line(limit)?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = u64::from_str_radix(size, 16).map_err(|_| Failure::Garbage)?;
            if size == 0 {
                // Trailers, up to an empty line.
                while !self.read_line(limit)?.is_empty() {}
                return Ok(total);
            }
            total += self.read_body(size, limit)?;
            if !self.read_line(limit)?.is_empty() {
                return Err(Failure::Garbage);
            }
        }
    }
}

fn is_wait(e: &std::io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|w| w == what)
}

enum Length {
    Known(u64),
    Chunked,
    UntilEnd,
}

struct Head {
    status: u16,
    length: Length,
    close: bool,
}

fn parse_head(head: &[u8]) -> Option<Head> {
    let text = String::from_utf8_lossy(head);
    let mut lines = text.split("\r\n");
    let first = lines.next()?;
    let rest = first.strip_prefix("HTTP/1.")?;
    let status = rest.split(' ').nth(1)?.parse().ok().filter(|s| (100..600).contains(s))?;
    let (mut length, mut close) = (Length::UntilEnd, rest.starts_with('0'));
    for line in lines {
        let (name, value) = line.split_once(':')?;
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            length = Length::Known(value.parse().ok()?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
            length = Length::Chunked;
        } else if name.eq_ignore_ascii_case("connection") {
            close = value.eq_ignore_ascii_case("close");
        }
    }
    Some(Head { status, length, close })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    /// Answers each connection's requests with the given bytes in turn; a connection ends after its last answer.
    fn server(connections: Vec<Vec<&'static [u8]>>) -> (Target, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target::parse(&format!("http://{}/v1/x", listener.local_addr().unwrap())).unwrap();
        let handle = std::thread::spawn(move || {
            let mut seen = Vec::new();
            for answers in connections {
                let (mut stream, _) = listener.accept().unwrap();
                for answer in answers {
                    let mut bytes = vec![0; 4096];
                    let n = stream.read(&mut bytes).unwrap();
                    seen.push(String::from_utf8_lossy(&bytes[..n]).into_owned());
                    // Byte by byte: an answer may come in any pieces.
                    for b in answer {
                        stream.write_all(&[*b]).unwrap();
                    }
                }
            }
            seen
        });
        (target, handle)
    }

    fn post(connection: &mut Connection) -> std::result::Result<Reply, Failure> {
        connection.post(None, b"{}", Duration::from_millis(400), &AtomicBool::new(false))
    }

    #[test]
    fn answers_of_known_length_and_in_chunks_share_a_connection() {
        let known = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
        let chunks =
            b"HTTP/1.1 503 Busy\r\ntransfer-encoding: Chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n";
        let after_continue = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n";
        let (target, handle) = server(vec![vec![known, chunks, after_continue]]);
        let mut connection = Connection::new(&target, "Authorization: Bearer k\r\n");
        assert_eq!(post(&mut connection), Ok(Reply { status: 200, bytes: 5 }));
        assert_eq!(connection.body, b"hello");
        assert_eq!(post(&mut connection), Ok(Reply { status: 503, bytes: 5 }));
        assert_eq!(connection.body, b"abcde");
        assert_eq!(post(&mut connection), Ok(Reply { status: 204, bytes: 0 }));
        assert_eq!(connection.connected, 1);
        let seen = handle.join().unwrap();
        let head = format!("POST /v1/x HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n", target.authority);
        assert_eq!(seen[0], format!("{head}Authorization: Bearer k\r\nContent-Length: 2\r\n\r\n{{}}"));
    }

    #[test]
    fn a_kept_connection_that_the_server_has_ended_is_made_anew() {
        let ok = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
        let (target, handle) = server(vec![vec![ok], vec![ok]]);
        let mut connection = Connection::new(&target, "");
        assert!(post(&mut connection).is_ok());
        std::thread::sleep(Duration::from_millis(50));
        assert!(post(&mut connection).is_ok());
        assert_eq!(connection.connected, 2);
        handle.join().unwrap();
    }

    #[test]
    fn an_announced_end_and_an_answer_without_length_end_the_connection() {
        let close = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx";
        let open = b"HTTP/1.0 200 OK\r\n\r\nuntil the end";
        let (target, handle) = server(vec![vec![close], vec![open]]);
        let mut connection = Connection::new(&target, "");
        assert_eq!(post(&mut connection), Ok(Reply { status: 200, bytes: 1 }));
        assert_eq!(post(&mut connection), Ok(Reply { status: 200, bytes: 13 }));
        assert!(connection.stream.is_none());
        handle.join().unwrap();
    }

    #[test]
    fn half_an_answer_garbage_and_silence_are_told_apart() {
        for (answer, want) in [
            (&b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf"[..], Failure::Closed),
            (b"SSH-2.0-x\r\n\r\n", Failure::Garbage),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Failure::Garbage),
        ] {
            let (target, handle) = server(vec![vec![answer]]);
            assert_eq!(post(&mut Connection::new(&target, "")), Err(want));
            handle.join().unwrap();
        }
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Target::parse(&format!("http://{}", silent.local_addr().unwrap())).unwrap();
        assert_eq!(post(&mut Connection::new(&target, "")), Err(Failure::Timeout));
        drop(silent);
        assert_eq!(post(&mut Connection::new(&target, "")), Err(Failure::Connect));
    }

    #[test]
    fn urls_are_read_and_bad_ones_are_told() {
        let target = Target::parse("http://127.0.0.1:8000/v1/systemone?x=1#part").unwrap();
        assert_eq!((target.authority.as_str(), target.path.as_str()), ("127.0.0.1:8000", "/v1/systemone?x=1"));
        assert_eq!(Target::parse("http://[::1]").unwrap().path, "/");
        for (url, words) in [
            ("https://x/", "TLS"),
            ("127.0.0.1:80", "http://"),
            ("http://", "host"),
            ("http://a:b@127.0.0.1/", "password"),
            ("http://127.0.0.1:99999/", "looked up"),
            ("http://127.0.0.1/a b", "blanks"),
        ] {
            let message = Target::parse(url).unwrap_err().to_string();
            assert!(message.contains(words), "{url}: {message}");
        }
    }
}

//! A stream whose peer must take what is written.

use std::future::Future;
use std::io::{Error, ErrorKind, Result};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

/// Fails a write when what was written before is not taken off our hands in time. The clock runs from the first write that has to wait to the flush that
/// finds everything gone, so that a peer who takes a byte now and then gains nothing by it.
pub struct Timed<S> {
    inner: S,
    most: Duration,
    clock: Pin<Box<Sleep>>,
    running: bool,
}

impl<S> Timed<S> {
    pub fn new(inner: S, most: Duration) -> Self {
        Timed { inner, most, clock: Box::pin(tokio::time::sleep(Duration::ZERO)), running: false }
    }

    /// A poll's result; if it waits, that the clock has not run out.
    fn waited<T>(&mut self, poll: Poll<Result<T>>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if poll.is_ready() {
            return poll;
        }
        if !self.running {
            self.running = true;
            self.clock.as_mut().reset(Instant::now() + self.most);
        }
        match self.clock.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the peer does not read"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<Result<usize>> {
        let poll = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.waited(poll, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[std::io::IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let poll = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.waited(poll, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_flush(cx);
        if poll.is_ready() {
            self.running = false;
        }
        self.waited(poll, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let poll = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.waited(poll, cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const MOST: Duration = Duration::from_millis(60);

    #[tokio::test]
    async fn a_peer_that_does_not_read_is_given_up() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stream = Timed::new(ours, MOST);
        let error = stream.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_peer_that_reads_a_byte_now_and_then_is_given_up_too() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut stream = Timed::new(ours, MOST);
        let trickle = tokio::spawn(async move {
            let mut byte = [0];
            while theirs.read(&mut byte).await.is_ok_and(|n| n > 0) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let error = stream.write_all(&[0; 1000]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        trickle.abort();
    }

    #[tokio::test]
    async fn a_peer_that_reads_is_served_however_long_it_waits_in_between() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut stream = Timed::new(ours, MOST);
        for _ in 0..3 {
            let reader = async {
                let mut bytes = [0; 100];
                theirs.read_exact(&mut bytes).await.unwrap();
            };
            let writer = async {
                stream.write_all(&[0; 100]).await.unwrap();
                stream.flush().await.unwrap();
            };
            tokio::join!(reader, writer);
            tokio::time::sleep(MOST).await;
        }
    }
}

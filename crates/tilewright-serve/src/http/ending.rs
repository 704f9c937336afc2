//! The end of a connection whose peer was answered before it had sent all of its request.
//!
//! A stream that is closed with bytes unread is reset, and a peer that is still sending may then lose the answer that tells it why it was refused. So what
//! such a peer still sends is taken and thrown away, for a while.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

/// Time for a peer to end what it was sending.
const WHOLE: Duration = Duration::from_secs(5);

/// Time for a peer that sends nothing.
const SILENCE: Duration = Duration::from_secs(1);

/// A body that tells whether some of it was left unread.
pub struct Watched<B> {
    inner: B,
    unread: Arc<AtomicBool>,
}

impl<B: HttpBody> Watched<B> {
    pub fn new(inner: B, unread: Arc<AtomicBool>) -> Self {
        unread.store(!inner.is_end_stream(), Ordering::Relaxed);
        Watched { inner, unread }
    }
}

impl<B: HttpBody<Data = Bytes> + Unpin> HttpBody for Watched<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let poll = Pin::new(&mut self.inner).poll_frame(cx);
        if matches!(poll, Poll::Ready(None)) || self.inner.is_end_stream() {
            self.unread.store(false, Ordering::Relaxed);
        }
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Says that nothing more comes and takes what the peer still sends, until it ends too, falls silent, or its time is over.
pub async fn end(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) {
    let rest = async {
        let mut unwanted = [0; 4096];
        stream.shutdown().await?;
        while timeout(SILENCE, stream.read(&mut unwanted)).await?? > 0 {}
        std::io::Result::Ok(())
    };
    let _ = timeout(WHOLE, rest).await;
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_body_that_was_read_is_told_from_one_that_was_not() {
        let unread = Arc::new(AtomicBool::new(true));
        let told = || unread.load(Ordering::Relaxed);
        Watched::new(Body::empty(), unread.clone());
        assert!(!told(), "nothing to read");
        let body = Watched::new(Body::from("text"), unread.clone());
        assert!(told());
        assert_eq!(body.collect().await.unwrap().to_bytes(), "text");
        assert!(!told());
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_still_sends_is_heard_out_but_not_for_ever() {
        for (pause, most) in [(SILENCE / 2, WHOLE), (SILENCE * 2, SILENCE)] {
            let (mut ours, mut theirs) = tokio::io::duplex(16);
            let sender = tokio::spawn(async move {
                while theirs.write_all(b"more").await.is_ok() {
                    tokio::time::sleep(pause).await;
                }
            });
            let start = tokio::time::Instant::now();
            end(&mut ours).await;
            assert_eq!(start.elapsed().as_millis(), most.as_millis());
            sender.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_ends_is_not_waited_for() {
        let (mut ours, theirs) = tokio::io::duplex(16);
        drop(theirs);
        let start = tokio::time::Instant::now();
        end(&mut ours).await;
        assert!(start.elapsed().is_zero());
    }
}

//! Bodies: read in time, within a size, unpacked within the same size, and counted in memory.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::fault::Fault;

/// Bytes that a permit stands for.
const UNIT: usize = 1024;

/// Memory that all bodies share.
pub struct Memory(Arc<Semaphore>);

impl Memory {
    pub fn new(bytes: usize) -> Self {
        Memory(Arc::new(Semaphore::new((bytes / UNIT).clamp(1, Semaphore::MAX_PERMITS))))
    }

    fn take(&self, bytes: usize) -> Result<OwnedSemaphorePermit, Fault> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        let busy = |_| Fault::Busy("server busy: too many request bodies are being read; try again later".into());
        self.0.clone().try_acquire_many_owned(units).map_err(busy)
    }
}

/// A body in memory; its place is free again when it is dropped.
pub struct Content {
    pub bytes: Vec<u8>,
    _held: Vec<OwnedSemaphorePermit>,
}

/// Reads a body of at most `most` bytes within `time`.
pub async fn read(
    memory: &Memory,
    headers: &HeaderMap,
    body: Body,
    most: usize,
    time: Duration,
) -> Result<Content, Fault> {
    let too_large = || Fault::TooLarge(format!("request body too large; the limit is {most} bytes"));
    let told = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<u64>().ok());
    if told.is_some_and(|n| n > most as u64) {
        return Err(too_large());
    }
    let unpack = encoding(headers)?;
    let mut held = Vec::new();
    let mut bytes = Vec::new();
    let mut body = body;
    let reading = async {
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.map_err(|_| Fault::BrokenBody)?.into_data() else { continue };
            // Counted while it comes: a length need not be told, and need not be true.
            if bytes.len() + data.len() > most {
                return Err(too_large());
            }
            let (before, after) = (bytes.len().div_ceil(UNIT), (bytes.len() + data.len()).div_ceil(UNIT));
            if after > before {
                held.push(memory.take((after - before) * UNIT)?);
            }
            bytes.extend_from_slice(&data);
        }
        Ok(())
    };
    tokio::time::timeout(time, reading).await.map_err(|_| Fault::SlowBody)??;
    if let Some(unpack) = unpack {
        held.push(memory.take(most)?);
        bytes = unpacked(unpack, &bytes, most)?.ok_or_else(too_large)?;
    }
    Ok(Content { bytes, _held: held })
}

#[derive(Clone, Copy, Debug)]
enum Packing {
    Gzip,
    Zstd,
}

fn encoding(headers: &HeaderMap) -> Result<Option<Packing>, Fault> {
    let mut found = None;
    for value in headers.get_all(header::CONTENT_ENCODING) {
        let name = value.to_str().unwrap_or("?").trim().to_ascii_lowercase();
        let packing = match name.as_str() {
            "" | "identity" => continue,
            "gzip" | "x-gzip" => Packing::Gzip,
            "zstd" => Packing::Zstd,
            _ => return Err(Fault::Encoding("this content encoding is not read; use gzip, zstd or none".into())),
        };
        if found.replace(packing).is_some() {
            return Err(Fault::Encoding("a body may be packed once".into()));
        }
    }
    Ok(found)
}

/// The unpacked bytes; none if they are more than `most`, of which no more is unpacked than that.
fn unpacked(packing: Packing, bytes: &[u8], most: usize) -> Result<Option<Vec<u8>>, Fault> {
    let bad = |what: String| Fault::malformed(&[], "encoding_invalid", format!("the body cannot be unpacked: {what}"));
    let mut out = Vec::new();
    let limit = most as u64 + 1;
    let result = match packing {
        Packing::Gzip => flate2::read::MultiGzDecoder::new(bytes).take(limit).read_to_end(&mut out),
        Packing::Zstd => {
            let mut rest = bytes;
            let mut decoder = ruzstd::decoding::StreamingDecoder::new(&mut rest).map_err(|e| bad(e.to_string()))?;
            Read::by_ref(&mut decoder).take(limit).read_to_end(&mut out)
        }
    };
    result.map_err(|e| bad(e.to_string()))?;
    Ok((out.len() <= most).then_some(out))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use axum::body::{Bytes, HttpBody};
    use axum::http::HeaderValue;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
    }

    fn packed(name: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(header::CONTENT_ENCODING, HeaderValue::from_static(name))])
    }

    async fn read_all(headers: HeaderMap, body: impl Into<Body>, most: usize) -> Result<Vec<u8>, Fault> {
        read(&Memory::new(1 << 20), &headers, body.into(), most, SECOND).await.map(|b| b.bytes)
    }

    #[tokio::test]
    async fn bodies_are_read_plain_and_packed() {
        let text = br#"{"state": "a a a a a a a a a"}"#;
        assert_eq!(read_all(HeaderMap::new(), &text[..], 100).await.unwrap(), text);
        assert_eq!(read_all(packed("gzip"), gzip(text), 100).await.unwrap(), text);
        assert_eq!(read_all(packed("zstd"), zstd(text), 100).await.unwrap(), text);
        assert_eq!(read_all(packed("identity"), &text[..], 100).await.unwrap(), text);
    }

    #[tokio::test]
    async fn a_body_beyond_the_limit_is_refused_with_and_without_a_length() {
        let big = vec![b' '; 101];
        assert!(matches!(read_all(HeaderMap::new(), big.clone(), 100).await, Err(Fault::TooLarge(_))));
        let told = HeaderMap::from_iter([(header::CONTENT_LENGTH, HeaderValue::from_static("101"))]);
        assert!(matches!(read_all(told, Body::empty(), 100).await, Err(Fault::TooLarge(_))));
    }

    #[tokio::test]
    async fn a_bomb_is_refused_without_being_unpacked() {
        let zeros = vec![0; 10 << 20];
        for (name, bomb) in [("gzip", gzip(&zeros)), ("zstd", zstd(&zeros))] {
            assert!(bomb.len() < 50_000);
            assert!(matches!(read_all(packed(name), bomb, 1 << 17).await, Err(Fault::TooLarge(_))), "{name}");
        }
    }

    #[tokio::test]
    async fn what_cannot_be_unpacked_is_the_callers_fault() {
        for name in ["gzip", "zstd"] {
            assert!(matches!(read_all(packed(name), &b"no"[..], 100).await, Err(Fault::Invalid { .. })), "{name}");
        }
        for name in ["br", "gzip, gzip", "deflate"] {
            assert!(matches!(read_all(packed(name), &b""[..], 100).await, Err(Fault::Encoding(_))), "{name}");
        }
    }

    #[tokio::test]
    async fn a_body_that_does_not_come_is_given_up() {
        let body = Body::new(Silent);
        let read = read(&Memory::new(1 << 20), &HeaderMap::new(), body, 100, Duration::from_millis(30)).await;
        assert!(matches!(read, Err(Fault::SlowBody)));
    }

    /// A body that never comes.
    struct Silent;

    impl HttpBody for Silent {
        type Data = Bytes;
        type Error = std::io::Error;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, std::io::Error>>> {
            std::task::Poll::Pending
        }
    }

    #[tokio::test]
    async fn memory_for_bodies_is_shared_and_comes_back() {
        let memory = Memory::new(4 * UNIT);
        let one = read(&memory, &HeaderMap::new(), vec![b' '; 3 * UNIT].into(), 1 << 20, SECOND).await.unwrap();
        let two = read(&memory, &HeaderMap::new(), vec![b' '; 2 * UNIT].into(), 1 << 20, SECOND).await;
        assert!(matches!(two, Err(Fault::Busy(_))));
        drop(one);
        assert!(read(&memory, &HeaderMap::new(), vec![b' '; 2 * UNIT].into(), 1 << 20, SECOND).await.is_ok());
    }
}

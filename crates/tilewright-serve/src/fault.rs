//! Why a request was not answered, and how that is told.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::{Value, json};

use crate::config::Dialect;
use crate::http::json_response;

/// One thing that is wrong with a request.
#[derive(Clone, PartialEq, Debug)]
pub struct Detail {
    /// Where, from `body` on.
    pub loc: Vec<Value>,
    /// What, for people.
    pub msg: String,
    /// What, for programs.
    pub kind: &'static str,
}

impl Detail {
    /// A detail at a path below the body.
    pub fn at(path: &[&str], kind: &'static str, msg: impl Into<String>) -> Self {
        let loc = std::iter::once("body").chain(path.iter().copied()).map(Value::from).collect();
        Detail { loc, msg: msg.into(), kind }
    }
}

/// Why a request was not answered.
#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// The body is not what it should be. `malformed` if it is not even a request: the `laya` dialect says 400 then.
    Invalid {
        /// At least one.
        details: Vec<Detail>,
        /// See above.
        malformed: bool,
    },
    /// Larger than a limit.
    TooLarge(String),
    /// No key, or a wrong one.
    Unauthenticated,
    /// More requests than the key may send.
    RateLimited(Duration),
    /// All places are taken, or the server is about to stop.
    Busy(String),
    /// It could not have been answered in its time.
    NoTime {
        /// Why, in numbers.
        message: String,
        /// When it may be.
        retry: Duration,
    },
    /// The time of the request has passed.
    Deadline,
    /// The body did not come in time.
    SlowBody,
    /// The body ended early, or the connection did.
    BrokenBody,
    /// A content encoding that is not read.
    Encoding(String),
    /// There is nothing at this path.
    NotFound(String),
    /// The path takes another method.
    Method(&'static str),
    /// The client has left; nobody reads this.
    Cancelled,
    /// Our fault. The cause is in the log, not in the response.
    Failed(String),
}

impl Fault {
    /// One thing wrong in a body that can be read.
    pub fn invalid(path: &[&str], kind: &'static str, msg: impl Into<String>) -> Self {
        Fault::Invalid { details: vec![Detail::at(path, kind, msg)], malformed: false }
    }

    /// A body that is no request.
    pub fn malformed(path: &[&str], kind: &'static str, msg: impl Into<String>) -> Self {
        Fault::Invalid { details: vec![Detail::at(path, kind, msg)], malformed: true }
    }

    /// The status in a dialect.
    pub fn status(&self, dialect: Dialect) -> StatusCode {
        match self {
            Fault::Invalid { malformed: true, .. } if dialect == Dialect::Laya => StatusCode::BAD_REQUEST,
            Fault::Invalid { .. } => StatusCode::UNPROCESSABLE_ENTITY,
            Fault::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            Fault::Unauthenticated => StatusCode::UNAUTHORIZED,
            Fault::RateLimited(_) => StatusCode::TOO_MANY_REQUESTS,
            Fault::Busy(_) | Fault::NoTime { .. } | Fault::Deadline | Fault::Cancelled => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Fault::SlowBody => StatusCode::REQUEST_TIMEOUT,
            Fault::BrokenBody => StatusCode::BAD_REQUEST,
            Fault::Encoding(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Fault::NotFound(_) => StatusCode::NOT_FOUND,
            Fault::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Fault::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// What kind of fault, for programs and metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Fault::Invalid { .. } => "invalid_request_error",
            Fault::TooLarge(_) => "request_too_large",
            Fault::Unauthenticated => "authentication_error",
            Fault::RateLimited(_) => "rate_limit_error",
            Fault::Busy(_) | Fault::NoTime { .. } => "overloaded_error",
            Fault::Deadline => "timeout_error",
            Fault::SlowBody => "body_timeout_error",
            Fault::BrokenBody => "incomplete_body_error",
            Fault::Encoding(_) => "unsupported_encoding_error",
            Fault::NotFound(_) => "not_found_error",
            Fault::Method(_) => "method_not_allowed_error",
            Fault::Cancelled => "cancelled",
            Fault::Failed(_) => "api_error",
        }
    }

    /// What is wrong, for people. Never holds what only the log may know.
    pub fn message(&self) -> String {
        match self {
            Fault::Invalid { details, .. } => details.iter().map(|d| d.msg.as_str()).collect::<Vec<_>>().join("; "),
            Fault::TooLarge(what) | Fault::Busy(what) | Fault::Encoding(what) => what.clone(),
            Fault::NoTime { message, .. } => message.clone(),
            Fault::Unauthenticated => "invalid or missing bearer token".into(),
            Fault::RateLimited(_) => "this key has sent more requests than it may; try again later".into(),
            Fault::Deadline => "the request was not answered in its time; try again later".into(),
            Fault::SlowBody => "the request body did not arrive in time".into(),
            Fault::BrokenBody => "the request body ended before it was complete".into(),
            Fault::NotFound(path) => format!("there is nothing at {path}"),
            Fault::Method(allowed) => format!("this path takes {allowed}"),
            Fault::Cancelled => "the client has left".into(),
            Fault::Failed(_) => "inference failed".into(),
        }
    }

    /// The body of the response.
    pub fn body(&self, dialect: Dialect) -> Value {
        match (dialect, self) {
            (Dialect::Laya, _) => json!({"detail": self.message()}),
            (Dialect::Jev, Fault::Invalid { details, .. }) => {
                let details: Vec<Value> =
                    details.iter().map(|d| json!({"loc": d.loc, "msg": d.msg, "type": d.kind})).collect();
                json!({"detail": details})
            }
            (Dialect::Jev, _) => json!({"detail": {"error_type": self.kind(), "message": self.message()}}),
        }
    }

    /// The response.
    pub fn response(&self, dialect: Dialect) -> Response {
        let mut response = json_response(self.status(dialect), &self.body(dialect));
        let headers = response.headers_mut();
        let retry = match self {
            Fault::RateLimited(wait) | Fault::NoTime { retry: wait, .. } => {
                Some(wait.as_secs_f64().ceil().max(1.0) as u64)
            }
            Fault::Busy(_) | Fault::Deadline => Some(1),
            _ => None,
        };
        if let Some(seconds) = retry {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        match self {
            Fault::Unauthenticated => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            Fault::Method(allowed) => {
                headers.insert(header::ALLOW, HeaderValue::from_static(allowed));
            }
            Fault::Encoding(_) => {
                headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip, zstd"));
            }
            // What is left of the body is not read.
            Fault::SlowBody | Fault::BrokenBody => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_requests_have_details_with_a_place_in_jev_and_a_text_in_laya() {
        let fault = Fault::invalid(&["questions", "q"], "value_error", "no");
        assert_eq!(fault.status(Dialect::Jev), 422);
        assert_eq!(
            fault.body(Dialect::Jev),
            json!({"detail": [{"loc": ["body", "questions", "q"], "msg": "no", "type": "value_error"}]})
        );
        assert_eq!(fault.status(Dialect::Laya), 422);
        assert_eq!(fault.body(Dialect::Laya), json!({"detail": "no"}));
    }

    #[test]
    fn what_is_no_request_is_400_in_laya_only() {
        let fault = Fault::malformed(&[], "json_invalid", "no");
        assert_eq!((fault.status(Dialect::Jev).as_u16(), fault.status(Dialect::Laya).as_u16()), (422, 400));
    }

    #[test]
    fn the_cause_of_a_failure_stays_inside() {
        let fault = Fault::Failed("a secret".into());
        for dialect in [Dialect::Jev, Dialect::Laya] {
            assert!(!fault.body(dialect).to_string().contains("secret"));
        }
    }

    #[test]
    fn who_should_come_back_is_told_when() {
        for (fault, seconds) in [
            (Fault::Busy(String::new()), "1"),
            (Fault::RateLimited(Duration::from_millis(2400)), "3"),
            (Fault::NoTime { message: String::new(), retry: Duration::from_millis(7100) }, "8"),
        ] {
            assert_eq!(fault.response(Dialect::Jev).headers()["retry-after"], seconds);
        }
        assert_eq!(Fault::Method("POST").response(Dialect::Jev).headers()["allow"], "POST");
    }
}

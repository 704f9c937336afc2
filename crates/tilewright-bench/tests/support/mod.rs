//! What several test programs share; each uses a part of it.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

/// What a server of a test says to a request: a status and a body.
pub type Behaviour = dyn Fn(&[u8]) -> (u16, String) + Send + Sync;

/// A small HTTP server: a thread a connection, connections are kept, and `behaviour` may take its time. Gives back its URL.
pub fn serve(behaviour: impl Fn(&[u8]) -> (u16, String) + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/systemone", listener.local_addr().unwrap());
    let behaviour: Arc<Behaviour> = Arc::new(behaviour);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let behaviour = behaviour.clone();
            // A client that leaves ends its thread.
            std::thread::spawn(move || converse(stream, &*behaviour));
        }
    });
    url
}

fn converse(stream: TcpStream, behaviour: &Behaviour) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut writer = stream;
    loop {
        let mut length = 0;
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if line == "\r\n" {
                break;
            }
            if let Some(value) = line.strip_prefix("Content-Length: ") {
                length = value.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        let (status, text) = behaviour(&body);
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{text}", text.len());
        writer.write_all(answer.as_bytes()).ok()?;
    }
}

/// The part of JSON Schema that the published files use.
pub fn conforms(
    root: &serde_json::Value,
    schema: &serde_json::Value,
    value: &serde_json::Value,
    at: &str,
    problems: &mut Vec<String>,
) {
    use serde_json::Value;
    if let Some(name) = schema["$ref"].as_str() {
        return conforms(root, root.pointer(name.trim_start_matches('#')).unwrap(), value, at, problems);
    }
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let fits = |t: &Value| t == kind || t == "integer" && (value.is_u64() || value.is_i64());
    let types = &schema["type"];
    if !types.is_null() && !types.as_array().map_or_else(|| fits(types), |list| list.iter().any(fits)) {
        return problems.push(format!("{at}: {kind} is not {types}"));
    }
    if schema["enum"].as_array().is_some_and(|list| !list.contains(value)) {
        problems.push(format!("{at}: {value} is not one of {}", schema["enum"]));
    }
    if let (Some(low), Some(v)) = (schema["exclusiveMinimum"].as_f64(), value.as_f64())
        && v <= low
    {
        problems.push(format!("{at}: {v} is not above {low}"));
    }
    for (i, item) in value.as_array().into_iter().flatten().enumerate() {
        conforms(root, &schema["items"], item, &format!("{at}[{i}]"), problems);
    }
    let properties = schema["properties"].as_object();
    for (key, item) in value.as_object().into_iter().flatten() {
        match properties.and_then(|p| p.get(key)) {
            Some(inner) => conforms(root, inner, item, &format!("{at}.{key}"), problems),
            None if schema["additionalProperties"] == false => problems.push(format!("{at}: unknown `{key}`")),
            None => conforms(root, &schema["additionalProperties"], item, &format!("{at}.{key}"), problems),
        }
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        if value.is_object() && value.get(name.as_str().unwrap()).is_none() {
            problems.push(format!("{at}: `{}` is missing", name.as_str().unwrap()));
        }
    }
}

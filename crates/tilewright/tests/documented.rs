//! What `docs/serve.md` shows is what happens: its examples are run as they stand, its flags, paths, metrics and files exist.
#![cfg(unix)]

mod served;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use served::{ASK, Answer, Server, read};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

fn page() -> String {
    std::fs::read_to_string(Path::new(ROOT).join("docs/serve.md")).unwrap()
}

/// The indented blocks, without their indent.
fn blocks(page: &str) -> Vec<Vec<String>> {
    let mut blocks: Vec<Vec<String>> = vec![Vec::new()];
    for line in page.lines() {
        match line.strip_prefix("    ") {
            Some(code) => blocks.last_mut().unwrap().push(code.to_owned()),
            None if line.is_empty() => {}
            None => blocks.push(Vec::new()),
        }
    }
    blocks.retain(|b| !b.is_empty());
    blocks
}

/// A block's commands: a line, and those that follow while a quotation is open.
fn commands(block: &[String]) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let mut open = false;
    for line in block {
        if open {
            let last = commands.last_mut().unwrap();
            last.push('\n');
            last.push_str(line);
        } else {
            commands.push(line.clone());
        }
        open ^= line.matches('\'').count() % 2 == 1;
    }
    commands
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn get(port: u16, path: &str) -> Option<Answer> {
    let mut stream = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    read(&mut stream)
}

/// A folder in which the examples are run one after the other, as a reader would.
struct Reader {
    folder: tempfile::TempDir,
    /// What the page calls 8000 and 8001.
    ports: [u16; 2],
    servers: Vec<Child>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Reader {
    fn stop(&mut self) {
        for mut server in self.servers.drain(..) {
            let _ = server.kill();
            let _ = server.wait();
        }
    }

    fn shell(&self, line: &str) -> Command {
        let program = Path::new(env!("CARGO_BIN_EXE_tilewright"));
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.folder.path());
        command.env("PATH", format!("{}:{path}", program.parent().unwrap().display()));
        command.env("TILEWRIGHT_PORT", self.ports[0].to_string()).env("TILEWRIGHT_THREADS", "1");
        command.env_remove("TILEWRIGHT_KEYS");
        command
    }

    /// What the page leaves to the reader: names of folders, ports that are free here, and hours that a test has not.
    fn meant(&self, line: &str) -> String {
        let [one, two] = self.ports.map(|p| p.to_string());
        [
            ("8000", one.as_str()),
            ("8001", two.as_str()),
            ("=DIR", "=laya-demo"),
            (" DIR", " laya-demo"),
            ("--seconds 60", "--seconds 1"),
            ("--pairs 60", "--pairs 2"),
            ("--sweep", "--sweep --seconds 1 --rate 40"),
            ("curl -", "curl -fsS -"),
        ]
        .iter()
        .fold(line.to_owned(), |line, (from, to)| line.replace(from, to))
    }

    fn run(&self, line: &str) -> Output {
        let output = self.shell(line).stdin(Stdio::null()).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "`{line}` ended with {:?}\n{out}\n{err}", output.status.code());
        output
    }

    fn serve(&mut self, line: &str, port: u16) {
        let mut server = self.shell(&format!("exec env {line}"));
        let child = server.env("TILEWRIGHT_PORT", port.to_string()).stderr(Stdio::null()).stdout(Stdio::null());
        self.servers.push(child.spawn().unwrap());
        let end = Instant::now() + Duration::from_secs(60);
        while get(port, "/health").is_none_or(|a| a.status != 200) {
            assert!(Instant::now() < end, "never ready: `{line}`");
            let ended = self.servers.last_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none(), "`{line}` ended with {ended:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A program that hands tools to a language model starts what its configuration says.
    fn tools(&self, configuration: &str) {
        let value: Value = serde_json::from_str(configuration).unwrap();
        let server = &value["mcpServers"]["tilewright"];
        let words = std::iter::once(&server["command"]).chain(server["args"].as_array().unwrap());
        let line: Vec<&str> = words.map(|w| w.as_str().unwrap()).collect();
        let mut command = self.shell(&self.meant(&format!("exec {}", line.join(" "))));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut to = child.stdin.take().unwrap();
        let hello = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
            {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "reader", "version": "1"}}});
        writeln!(to, "{hello}\n{}", json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).unwrap();
        writeln!(to, "{}", json!({"jsonrpc": "2.0", "id": 2, "method": "tools/list"})).unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines.next().unwrap().unwrap();
        let listed: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        let text = page();
        for tool in listed["result"]["tools"].as_array().unwrap() {
            let name = tool["name"].as_str().unwrap();
            assert!(text.contains(&format!("`{name}`")), "the page does not name the tool {name}");
        }
        drop(to);
        child.wait().unwrap();
    }
}

#[test]
fn the_examples_of_the_page_run_as_they_stand() {
    if Command::new("curl").arg("--version").output().is_err() {
        eprintln!("NOT TESTED: the page's examples; there is no curl here");
        return;
    }
    let mut reader =
        Reader { folder: tempfile::tempdir().unwrap(), ports: [free_port(), free_port()], servers: Vec::new() };
    std::fs::write(reader.folder.path().join("requests.jsonl"), format!("{ASK}\n")).unwrap();
    let mut keys = String::new();
    let mut ran = 0;
    for block in blocks(&page()) {
        for command in commands(&block) {
            let meant = reader.meant(command.split("  #").next().unwrap().trim_end());
            ran += 1;
            match command.split(' ').next().unwrap() {
                _ if command.is_empty() || command.starts_with('#') => ran -= 1,
                // Some with a variable in front.
                word if command.contains("tilewright serve") && (word == "tilewright" || word.contains('=')) => {
                    reader.stop();
                    let port = reader.ports[0];
                    reader.serve(&meant, port);
                }
                "tilewright" => {
                    if command.contains("bench load") {
                        reader.stop();
                        for port in reader.ports.into_iter().take(1 + usize::from(command.contains("--compare"))) {
                            reader.serve("tilewright serve --model laya-demo", port);
                        }
                    }
                    reader.run(&meant);
                }
                "curl" => {
                    let output = reader.run(&meant);
                    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
                    assert!(answer["answers"]["refund"].is_object(), "`{meant}`: {answer}");
                }
                // Lines of the file of keys.
                word if word.starts_with("alice:") || word.starts_with("nightly-job:") => {
                    keys.push_str(&format!("{word}\n"));
                    std::fs::write(reader.folder.path().join("keys.txt"), &keys).unwrap();
                }
                word if word.starts_with('{') => reader.tools(&command),
                word => panic!("an example that begins with `{word}`: tell this test how a reader runs it"),
            }
        }
    }
    assert!(ran >= 12, "{ran} examples");
    assert!(reader.folder.path().join("load.html").exists());
}

#[test]
fn flags_that_the_page_names_exist() {
    let mut known = String::new();
    for command in [vec!["serve"], vec!["mcp"], vec!["bench", "load"], vec!["decide", "demo"], vec!["decide"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_tilewright")).args(&command).arg("--help").output().unwrap();
        known.push_str(&String::from_utf8(output.stdout).unwrap());
    }
    let is_part = |c: char| c.is_ascii_lowercase() || c == '-';
    let has = |flag: &str| known.match_indices(flag).any(|(at, _)| !known[at + flag.len()..].starts_with(is_part));
    let page = page();
    let mut flags: Vec<&str> = page
        .match_indices("--")
        .filter(|(at, _)| page[..*at].ends_with([' ', '`', '\n', '[']))
        .map(|(at, _)| page[at..].split(|c: char| !is_part(c)).next().unwrap())
        .filter(|flag| flag.len() > 2)
        .collect();
    flags.sort_unstable();
    flags.dedup();
    assert!(flags.len() > 12, "{flags:?}");
    for flag in flags {
        // Of the build, not of the program.
        assert!(["--features", "--release"].contains(&flag) || has(flag), "there is no {flag}");
    }
}

#[test]
fn paths_metrics_and_files_that_the_page_names_exist() {
    let server = Server::start(&[], &[]);
    let page = page();
    let batch = ASK.replacen("\"state\": \"My card was charged twice\"", "\"states\": [\"one\", \"two\"]", 1);
    let mut paths = 0;
    for row in page.lines().filter_map(|l| l.strip_prefix("| `")) {
        let cell = row.split('`').next().unwrap();
        let status = match cell.split_once(' ') {
            Some(("GET", path)) => server.get(path).status,
            Some(("POST", "/mcp")) => {
                let ping = json!({"jsonrpc": "2.0", "id": 1, "method": "ping"}).to_string();
                let lines = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n";
                server.post_with("/mcp", lines, ping).status
            }
            Some(("POST", path)) => server.post(path, if path.ends_with("batch") { &batch } else { ASK }).status,
            _ => continue,
        };
        assert_eq!(status, 200, "{cell}");
        paths += 1;
    }
    assert!(paths >= 9, "{paths} paths");
    assert_eq!(server.post("/v1/systemone", "{}").status, 422);
    let metrics = String::from_utf8(server.get("/metrics").body).unwrap();
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let mut names = 0;
    for (at, _) in page.match_indices("`tilewright_") {
        let name = page[at + 1..].split(|c: char| !is_part(c)).next().unwrap();
        names += 1;
        assert!(
            metrics.contains(&format!("\n# TYPE {name} ")) || metrics.starts_with(&format!("# TYPE {name} ")),
            "no metric {name}"
        );
    }
    assert!(names >= 6, "{names} metrics");
    let deploy = page.split("`deploy/` has").nth(1).unwrap();
    let files: Vec<&str> = deploy.lines().filter_map(|l| l.strip_prefix("* `")?.split('`').next()).collect();
    assert!(files.len() >= 5, "{files:?}");
    for file in files {
        assert!(Path::new(ROOT).join("deploy").join(file).is_file(), "there is no deploy/{file}");
    }
}

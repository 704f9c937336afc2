//! A browser without a window, told what to do over a pair of pipes (the Chrome DevTools protocol): real keys, real widths, real colours.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A browser with one page.
pub struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    session: Option<String>,
    next: u64,
    // Removed after the browser has ended.
    _folder: tempfile::TempDir,
}

/// Control, as the protocol counts modifiers.
pub const CONTROL: u32 = 2;
/// Shift.
pub const SHIFT: u32 = 8;
/// No test of a page takes longer.
const MOST: Duration = Duration::from_secs(150);

impl Browser {
    /// Starts one; `None` where there is none.
    pub fn start() -> Option<Browser> {
        let program = ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
            let paths = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&paths).any(|folder| folder.join(name).is_file())
        })?;
        let folder = tempfile::tempdir().unwrap();
        let pipes = ["in", "out"].map(|name| folder.path().join(name));
        assert!(Command::new("mkfifo").args(&pipes).status().unwrap().success());
        let mut command = Command::new("sh");
        // The protocol wants descriptors 3 and 4; a shell hands them over.
        command.args(["-c", "in=$1 out=$2; shift 2; exec \"$@\" 3<\"$in\" 4>\"$out\"", "sh"]).args(&pipes);
        command.args([
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]);
        command
            .args(["--remote-debugging-pipe", &format!("--user-data-dir={}", folder.path().join("profile").display())]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Opening waits for the other side; a browser that does not start would never come.
        watch(&child);
        let (to, from) = (File::options().write(true).open(&pipes[0]).unwrap(), File::open(&pipes[1]).unwrap());
        assert!(child.try_wait().unwrap().is_none(), "{program} ended at once");
        let mut browser = Browser { child, to, from: BufReader::new(from), session: None, next: 0, _folder: folder };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}))["targetId"].clone();
        let session = browser.call("Target.attachToTarget", json!({"targetId": target, "flatten": true}));
        browser.session = Some(session["sessionId"].as_str().unwrap().to_owned());
        browser.call("Page.enable", json!({}));
        browser.call("Runtime.enable", json!({}));
        Some(browser)
    }

    /// One command and its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let mut bytes = Vec::new();
            assert!(self.from.read_until(0, &mut bytes).unwrap() > 0, "the browser ended at {method}");
            bytes.pop();
            let answer: Value = serde_json::from_slice(&bytes).unwrap();
            if answer["id"] == self.next {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }

    /// What a piece of script says; a promise is waited for.
    pub fn eval(&mut self, script: &str) -> Value {
        let result = self.call(
            "Runtime.evaluate",
            json!({"expression": script, "awaitPromise": true, "returnByValue": true, "userGesture": true}),
        );
        assert!(result["exceptionDetails"].is_null(), "{script}: {}", result["exceptionDetails"]);
        result["result"]["value"].clone()
    }

    /// Waits until a piece of script is true.
    pub fn until(&mut self, script: &str) {
        let end = Instant::now() + Duration::from_secs(20);
        while self.eval(script) != true {
            assert!(Instant::now() < end, "never: {script}; the page says {}", self.eval("document.body.innerText"));
            std::thread::sleep(Duration::from_millis(30));
        }
    }

    /// Opens a page.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'");
    }

    /// The size of the window, as a phone or a desk has it.
    pub fn size(&mut self, width: u32, height: u32) {
        let phone = width < 600;
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
    }

    /// What the system prefers: `light` or `dark`.
    pub fn prefers(&mut self, scheme: &str) {
        self.call(
            "Emulation.setEmulatedMedia",
            json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
        );
    }

    /// Presses a key, such as `Tab`, `Enter` or `a`.
    pub fn key(&mut self, key: &str, modifiers: u32) {
        let (code, number, text) = match key {
            "Tab" => ("Tab".to_owned(), 9, None),
            "Enter" => ("Enter".to_owned(), 13, Some("\r")),
            " " => ("Space".to_owned(), 32, Some(" ")),
            "ArrowDown" => (key.to_owned(), 40, None),
            "ArrowRight" => (key.to_owned(), 39, None),
            other => {
                (format!("Key{}", other.to_uppercase()), u32::from(other.to_uppercase().as_bytes()[0]), Some(other))
            }
        };
        let mut event = json!({"type": "keyDown", "key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": modifiers});
        if let Some(text) = text.filter(|_| modifiers & CONTROL == 0) {
            event["text"] = text.into();
        }
        self.call("Input.dispatchKeyEvent", event.clone());
        event["type"] = "keyUp".into();
        self.call("Input.dispatchKeyEvent", event);
    }

    /// Types a text where the focus is.
    pub fn insert(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Presses Tab until a piece of script about the focused element `e` is true.
    pub fn tab_to(&mut self, script: &str) {
        for _ in 0..200 {
            self.key("Tab", 0);
            if self.eval(&format!("(e => {script})(document.activeElement)")) == true {
                return;
            }
        }
        panic!("Tab never comes to {script}");
    }

    /// Keeps a picture for who wants to look: in the folder that `TILEWRIGHT_SCREENSHOTS` names.
    pub fn picture(&mut self, name: &str) {
        let Some(folder) = std::env::var_os("TILEWRIGHT_SCREENSHOTS") else { return };
        let shot = self.call("Page.captureScreenshot", json!({"format": "png", "captureBeyondViewport": true}));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(Path::new(&folder).join(name), base64(shot["data"].as_str().unwrap())).unwrap();
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a browser that takes too long, so that who waits for it hears.
fn watch(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    let began = Instant::now();
    std::thread::spawn(move || {
        while began.elapsed() < MOST {
            std::thread::sleep(Duration::from_millis(500));
            if rustix::process::test_kill_process(pid).is_err() {
                return;
            }
        }
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    });
}

fn base64(text: &str) -> Vec<u8> {
    let value = |b: u8| match b {
        b'A'..=b'Z' => b - b'A',
        b'a'..=b'z' => b - b'a' + 26,
        b'0'..=b'9' => b - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut out = Vec::new();
    for four in text.trim_end_matches('=').as_bytes().chunks(4) {
        let bits = four.iter().fold(0u32, |bits, b| bits << 6 | u32::from(value(*b))) << (6 * (4 - four.len()));
        out.extend(&bits.to_be_bytes()[1..four.len()]);
    }
    out
}

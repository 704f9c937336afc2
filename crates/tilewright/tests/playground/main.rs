//! The playground in a real browser, asking a real server: with keys alone, on a phone, in the dark. Needs chromium; without it the tests say so and end.
#![cfg(unix)]

mod browser;
#[path = "../served/mod.rs"]
mod served;

use browser::{Browser, CONTROL, SHIFT};
use serde_json::Value;
use served::Server;

/// A page of a fresh server in a fresh browser.
fn page(keys: Option<&str>) -> Option<(Server, Browser)> {
    let Some(mut browser) = Browser::start() else {
        eprintln!("NOT TESTED: the playground; no chromium here (Debian: apt-get install chromium)");
        return None;
    };
    let environment: Vec<(&str, &str)> = keys.map(|keys| ("TILEWRIGHT_KEYS", keys)).into_iter().collect();
    let server = Server::start(&[], &environment);
    browser.size(1280, 900);
    browser.open(&server.url);
    Some((server, browser))
}

const CHOOSE: &str = "const set = (id, v) => { const e = document.getElementById(id); e.value = v; e.dispatchEvent(new Event('input', {bubbles: true})); \
                      e.dispatchEvent(new Event('change', {bubbles: true})); };";

fn set(browser: &mut Browser, id: &str, value: &str) {
    browser.eval(&format!("(() => {{ {CHOOSE} set({id:?}, {}) }})()", Value::from(value)));
}

fn ask(browser: &mut Browser) {
    browser.eval("document.getElementById('status').textContent = ''");
    browser.eval("document.getElementById('run').click()");
    browser.until("!document.getElementById('run').hasAttribute('aria-disabled') && document.getElementById('status').textContent !== ''");
}

fn text(browser: &mut Browser, selector: &str) -> String {
    let found =
        browser.eval(&format!("[...document.querySelectorAll({selector:?})].map(e => e.innerText).join('\\n')"));
    found.as_str().unwrap().to_owned()
}

fn fits(browser: &mut Browser, what: &str) {
    let wide = browser.eval(
        "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.sr, .skip'))\
         .map(e => e.tagName + '.' + e.className + '#' + e.id).slice(0, 5).join(' ')",
    );
    assert_eq!(wide, "", "{what}: sticks out");
    assert_eq!(browser.eval("document.documentElement.scrollWidth <= innerWidth"), true, "{what}: scrolls sideways");
}

#[test]
fn a_preset_is_answered_with_distributions_and_tokens_of_every_part() {
    let Some((_server, mut browser)) = page(None) else { return };
    set(&mut browser, "preset", "triage");
    ask(&mut browser);
    assert_eq!(browser.eval("document.querySelectorAll('#answers article').length"), 5);
    assert_eq!(browser.eval("document.querySelectorAll('#answers article:first-of-type .bars li').length"), 6);
    let sums = "[...document.querySelectorAll('#answers .bars')].every(l => Math.abs([...l.querySelectorAll('.pct')]\
                .reduce((s, e) => s + parseFloat(e.textContent), 0) - 100) < 0.6)";
    assert_eq!(browser.eval(sums), true, "every distribution adds up to 100 %");
    let tokens = text(&mut browser, "#tokens");
    for words in ["Tokens of the state", "Row of intent", "instructions", "options", "Every token"] {
        assert!(tokens.contains(words), "{words}: {tokens}");
    }
    // Everything was fetched from the server itself.
    let foreign = "performance.getEntriesByType('resource').filter(r => !r.name.startsWith(location.origin) && !r.name.startsWith('data:')).length";
    assert_eq!(browser.eval(foreign), 0);
    browser.picture("desk-light.png");
    browser.eval("document.getElementById('explain').click()");
    set(&mut browser, "dialect", "jev");
    ask(&mut browser);
    assert_eq!(browser.eval("document.querySelectorAll('#answers article').length"), 5);
    assert!(text(&mut browser, "#tokens").contains("the dialect laya does"));
}

#[test]
fn errors_are_told_in_words_and_never_as_markup() {
    let Some((_server, mut browser)) = page(None) else { return };
    set(&mut browser, "preset", "guard");
    set(&mut browser, "model", "someone/<img src=x onerror=alert(1)>");
    for dialect in ["laya", "jev"] {
        set(&mut browser, "dialect", dialect);
        ask(&mut browser);
        let error = text(&mut browser, "#error");
        assert!(
            error.contains("Refused: 422") && error.contains("no model") && error.contains("<img src=x"),
            "{error}"
        );
        assert!(!error.contains("[object") && !error.contains("\"detail\""), "{error}");
    }
    assert_eq!(browser.eval("document.querySelectorAll('#results img').length"), 0);
    browser.picture("error.png");
    // What cannot even be sent is told without asking.
    set(&mut browser, "model", "");
    set(&mut browser, "state", "{\"a\": 1,");
    ask(&mut browser);
    let error = text(&mut browser, "#error");
    assert!(error.contains("cannot be sent yet") && error.contains("line 1, column 9"), "{error}");
    set(&mut browser, "state", "{\"prompt\": \"hello\"}");
    ask(&mut browser);
    assert_eq!(text(&mut browser, "#error"), "");
}

#[test]
fn a_key_is_asked_for_and_accepted() {
    let Some((_server, mut browser)) = page(Some("me:open-sesame")) else { return };
    set(&mut browser, "preset", "router");
    ask(&mut browser);
    let error = text(&mut browser, "#error");
    assert!(error.contains("401") && error.contains("API key"), "{error}");
    set(&mut browser, "key", "open-sesame");
    ask(&mut browser);
    assert_eq!(browser.eval("document.querySelectorAll('#answers article').length"), 4);
    browser.eval("document.getElementById('curl').click()");
    browser.until("document.getElementById('code').textContent !== ''");
    let code = browser.eval("document.getElementById('code').textContent");
    let code = code.as_str().unwrap();
    assert!(code.contains("$TILEWRIGHT_KEY") && !code.contains("sesame"), "a copied program holds no key: {code}");
}

#[test]
fn a_long_state_is_cut_and_said_so_and_a_longer_one_is_refused_in_words() {
    let Some((_server, mut browser)) = page(None) else { return };
    set(&mut browser, "preset", "moderation");
    browser.eval(&format!(
        "(() => {{ {CHOOSE} set('state', JSON.stringify({{post: 'long words without an end '.repeat(1500)}})) }})()"
    ));
    ask(&mut browser);
    let tokens = text(&mut browser, "#tokens");
    assert!(tokens.contains("left out") && tokens.contains("had no room for all of it"), "{tokens}");
    fits(&mut browser, "a long state");
    browser.picture("long.png");
    browser.eval(&format!("(() => {{ {CHOOSE} set('state', JSON.stringify({{post: 'x'.repeat(60000)}})) }})()"));
    assert_eq!(browser.eval("document.getElementById('state-note').classList.contains('over')"), true);
    ask(&mut browser);
    let error = text(&mut browser, "#error");
    assert!(error.contains("413") && error.contains("50000"), "{error}");
}

#[test]
fn everything_can_be_done_with_keys_alone() {
    let Some((_server, mut browser)) = page(None) else { return };
    browser.tab_to("e.id === 'preset'");
    browser.key("e", 0);
    browser.until(
        "document.getElementById('preset').value === 'email' && document.querySelectorAll('.card').length === 5",
    );
    browser.key("Enter", CONTROL);
    browser.until("document.querySelectorAll('#answers article').length === 5");
    // Every stop of the Tab key is visible, has a name, and leads on.
    browser.eval("document.activeElement.blur()");
    let mut stops = Vec::new();
    for _ in 0..300 {
        browser.key("Tab", 0);
        let stop = browser.eval(
            "(e => e === document.body ? null : { outline: getComputedStyle(e).outlineStyle !== 'none' || e.type === 'radio' && \
             getComputedStyle(e.nextElementSibling).outlineStyle !== 'none', path: e.tagName + e.id + [...document.querySelectorAll('*')].indexOf(e) })\
             (document.activeElement)",
        );
        if stop.is_null() || stops.contains(&stop) {
            break;
        }
        assert_eq!(stop["outline"], true, "the focus must be seen at {stop}");
        stops.push(stop);
    }
    assert!(stops.len() > 40, "{}", stops.len());
    // A question of one's own, from nothing to its answer.
    browser.tab_to("e.id === 'add'");
    browser.key("Enter", 0);
    browser.until("document.querySelectorAll('.card').length === 6");
    browser.key("a", CONTROL);
    browser.eval("document.activeElement.select()");
    browser.insert("mine");
    browser.key("Tab", 0);
    browser.key("c", 0);
    browser.until("document.querySelectorAll('.card:last-of-type .option').length === 2");
    browser.key("Tab", 0);
    browser.insert("Which colour?");
    for label in ["red", "blue"] {
        browser.tab_to("e.value === '' && !!e.closest('label')?.textContent.startsWith('Label')");
        browser.insert(label);
    }
    browser.key("Enter", CONTROL);
    browser.until("document.querySelectorAll('#answers article').length === 6");
    assert!(text(&mut browser, "#answers article:last-of-type").contains("mine"));
    // Removing one keeps the focus somewhere useful.
    browser.tab_to("e.textContent === 'Remove the question'");
    browser.key(" ", 0);
    browser.until("document.querySelectorAll('.card').length === 5");
    assert_eq!(browser.eval("document.activeElement !== document.body"), true);
    browser.key("Tab", SHIFT);
    assert_eq!(browser.eval("document.activeElement !== document.body"), true);
}

#[test]
fn every_control_has_a_name_for_who_does_not_see_it() {
    let Some((_server, mut browser)) = page(None) else { return };
    set(&mut browser, "preset", "triage");
    ask(&mut browser);
    browser.call("Accessibility.enable", serde_json::json!({}));
    let tree = browser.call("Accessibility.getFullAXTree", serde_json::json!({}));
    let mut controls = 0;
    for node in tree["nodes"].as_array().unwrap() {
        let role = node["role"]["value"].as_str().unwrap_or_default();
        if ["button", "textbox", "combobox", "radio", "checkbox", "link", "group"].contains(&role)
            && node["ignored"] != true
        {
            controls += 1;
            assert!(node["name"]["value"].as_str().is_some_and(|n| !n.trim().is_empty()) || role == "group", "{node}");
        }
    }
    assert!(controls > 40, "{controls}");
}

#[test]
fn nothing_sticks_out_of_a_phone() {
    let Some((_server, mut browser)) = page(None) else { return };
    for width in [390, 320] {
        browser.size(width, 800);
        let url = browser_url(&mut browser);
        browser.open(&url);
        fits(&mut browser, "an empty page");
        set(&mut browser, "preset", "triage");
        fits(&mut browser, "a form");
        ask(&mut browser);
        browser.eval("document.querySelectorAll('details').forEach(d => { d.open = true; })");
        fits(&mut browser, "answers");
        browser.picture(&format!("phone-{width}.png"));
        let name = "a_name_of_a_question_without_a_single_place_to_break_it_".repeat(4);
        browser.eval("document.querySelector('input[name=\"questions-mode\"][value=json]').click()");
        set(
            &mut browser,
            "questions",
            &format!(
                r#"{{"{name}": {{"type": "choice", "instructions": "?", "criteria": {{"{name}": "{name}", "b": null}}}}}}"#
            ),
        );
        ask(&mut browser);
        fits(&mut browser, "long names");
        browser.eval("document.querySelector('input[name=\"questions-mode\"][value=form]').click()");
        fits(&mut browser, "a form of long names");
        set(&mut browser, "model", &format!("x/{name}"));
        ask(&mut browser);
        fits(&mut browser, "an error");
        // Fingers need something to hit.
        let small = "[...document.querySelectorAll('button, select')].filter(e => e.offsetParent && e.getBoundingClientRect().height < 30).length";
        assert_eq!(browser.eval(small), 0);
    }
}

fn browser_url(browser: &mut Browser) -> String {
    browser.eval("location.href").as_str().unwrap().to_owned()
}

/// The least contrast of any text on the page against what is behind it, with the text.
const CONTRAST: &str = "(() => { const parse = c => { const n = c.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; }; \
    const light = c => { const [r, g, b] = c.slice(0, 3).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); \
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; }; \
    const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0.99) return c; } return [255, 255, 255, 1]; }; \
    let worst = [99, '']; \
    for (const e of document.querySelectorAll('body *')) { \
        if (!e.offsetParent || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue; \
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x); \
        const ratio = (a + 0.05) / (b + 0.05); if (ratio < worst[0]) worst = [ratio, e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 40)]; } \
    return worst; })()";

#[test]
fn light_and_dark_can_both_be_read() {
    let Some((_server, mut browser)) = page(None) else { return };
    set(&mut browser, "preset", "triage");
    set(&mut browser, "min_confidence", "0.99");
    ask(&mut browser);
    let mut backgrounds = Vec::new();
    for (system, chosen) in [("light", ""), ("dark", ""), ("light", "dark"), ("dark", "light")] {
        browser.prefers(system);
        set(&mut browser, "theme", chosen);
        let worst = browser.eval(CONTRAST);
        assert!(worst[0].as_f64().unwrap() >= 4.5, "{system} {chosen}: contrast of {worst}");
        backgrounds.push(browser.eval("getComputedStyle(document.body).backgroundColor"));
        browser.picture(&format!("{system}-{chosen}.png"));
    }
    assert_ne!(backgrounds[0], backgrounds[1], "the system decides");
    assert_eq!((&backgrounds[1], &backgrounds[0]), (&backgrounds[2], &backgrounds[3]), "unless somebody chooses");
}

#[test]
fn json_goes_out_as_it_was_written() {
    let Some((_server, mut browser)) = page(None) else { return };
    // Keys that look like numbers, large numbers and 1.0 are what JavaScript's own reader would change.
    browser.eval("document.querySelector('input[name=\"state-mode\"][value=json]').click()");
    set(&mut browser, "state", r#"{"10": 12345678901234567890, "9": 1.0, "b": "x"}"#);
    browser.eval("document.querySelector('input[name=\"questions-mode\"][value=json]').click()");
    let questions =
        r#"{"q": {"type": "choice", "instructions": "Which?", "criteria": {"10": "ten", "9": "nine", "a": null}}}"#;
    set(&mut browser, "questions", questions);
    let body = browser.eval("bodyText()");
    assert!(body.as_str().unwrap().contains(r#"{"10": 12345678901234567890, "9": 1.0, "b": "x"}"#), "{body}");
    ask(&mut browser);
    let names = browser.eval("[...document.querySelectorAll('#answers .name')].map(e => e.textContent).join(' ')");
    assert_eq!(names, "10 9 a", "options stand in their order");
    // Through the form and back nothing is lost.
    browser.eval("document.querySelector('input[name=\"questions-mode\"][value=form]').click()");
    assert_eq!(browser.eval("document.querySelectorAll('.card .option').length"), 3);
    let again = browser.eval("JSON.stringify(J.write(formNode()))");
    let again: String = serde_json::from_str(again.as_str().unwrap()).unwrap();
    let (a, b): (Value, Value) = (serde_json::from_str(&again).unwrap(), serde_json::from_str(questions).unwrap());
    assert_eq!(a.to_string(), b.to_string());
    // A question that a form cannot show stays as it is.
    browser.eval("document.querySelector('input[name=\"questions-mode\"][value=json]').click()");
    set(&mut browser, "questions", r#"{"q": {"type": "noul", "instructions": {"a": [1]}}}"#);
    browser.eval("document.querySelector('input[name=\"questions-mode\"][value=form]').click()");
    assert!(text(&mut browser, ".card").contains("as JSON"));
    ask(&mut browser);
    assert_eq!(text(&mut browser, "#error"), "");
}

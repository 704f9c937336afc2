//! cuBLASLt: descriptors are remembered, and a product is checked against them: sizes that fit one another, matrices that lie in allocated memory.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use crate::give;
use crate::state::{Handle, State, Status, answer};

#[derive(Clone, Copy, Debug, Default)]
struct Desc {
    transposed: [u32; 2],
    epilogue: u32,
    bias: u64,
    aux: u64,
    aux_ld: u64,
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    size: usize,
    rows: u64,
    columns: u64,
    ld: i64,
}

enum Object {
    Library,
    Desc(Desc),
    Layout(Layout),
    Preference,
}

static OBJECTS: Mutex<Option<HashMap<usize, Object>>> = Mutex::new(None);

/// Runs a call over the objects, of which each is a handle of the driver's table, too.
fn objects(call: &str, f: impl FnOnce(&mut HashMap<usize, Object>, &mut State) -> Result<(), String>) -> Status {
    answer(call, |state| {
        let mut guard = OBJECTS.lock().unwrap_or_else(PoisonError::into_inner);
        f(guard.get_or_insert_with(HashMap::new), state)
    })
}

fn create(call: &str, out: *mut Handle, object: Object) -> Status {
    objects(call, |all, state| {
        let handle = state.handle("cublasLt object");
        all.insert(handle as usize, object);
        give(out, handle)
    })
}

fn destroy(call: &str, handle: Handle) -> Status {
    objects(call, |all, state| {
        let at = state.destroy("cublasLt object", handle)?;
        all.remove(&at).map(|_| ()).ok_or_else(|| "no such object".into())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetVersion() -> usize {
    130_000
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtGetStatusName(_status: Status) -> *const c_char {
    crate::state::last_words()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtCreate(out: *mut Handle) -> Status {
    create("cublasLtCreate", out, Object::Library)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtDestroy(handle: Handle) -> Status {
    destroy("cublasLtDestroy", handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescCreate(out: *mut Handle, _compute: c_int, _scale: c_int) -> Status {
    create("cublasLtMatmulDescCreate", out, Object::Desc(Desc { epilogue: 1, ..Desc::default() }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescDestroy(handle: Handle) -> Status {
    destroy("cublasLtMatmulDescDestroy", handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulDescSetAttribute(
    desc: Handle,
    which: c_int,
    value: *const c_void,
    bytes: usize,
) -> Status {
    objects("cublasLtMatmulDescSetAttribute", |all, _| {
        let Some(Object::Desc(desc)) = all.get_mut(&(desc as usize)) else { return Err("no descriptor".into()) };
        // SAFETY: so many bytes of the caller.
        let value = unsafe {
            match bytes {
                4 => u64::from(value.cast::<u32>().read_unaligned()),
                8 => value.cast::<u64>().read_unaligned(),
                other => return Err(format!("attribute {which} of {other} bytes")),
            }
        };
        match which {
            3 | 4 => desc.transposed[which as usize - 3] = value as u32,
            7 => desc.epilogue = value as u32,
            8 => desc.bias = value,
            11 => desc.aux = value,
            12 => desc.aux_ld = value,
            other => return Err(format!("attribute {other} is not known here")),
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutCreate(
    out: *mut Handle,
    kind: c_int,
    rows: u64,
    columns: u64,
    ld: i64,
) -> Status {
    let size = if kind == 0 { 4 } else { 2 };
    if ![0, 2, 14].contains(&kind) || rows == 0 || columns == 0 || (ld as u64) < rows {
        return answer("cublasLtMatrixLayoutCreate", |_| Err(format!("type {kind}, {rows} x {columns}, {ld} apart")));
    }
    create("cublasLtMatrixLayoutCreate", out, Object::Layout(Layout { size, rows, columns, ld }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatrixLayoutDestroy(handle: Handle) -> Status {
    destroy("cublasLtMatrixLayoutDestroy", handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceCreate(out: *mut Handle) -> Status {
    create("cublasLtMatmulPreferenceCreate", out, Object::Preference)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceDestroy(handle: Handle) -> Status {
    destroy("cublasLtMatmulPreferenceDestroy", handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulPreferenceSetAttribute(
    preference: Handle,
    which: c_int,
    _value: *const c_void,
    bytes: usize,
) -> Status {
    objects("cublasLtMatmulPreferenceSetAttribute", |all, _| match (all.get(&(preference as usize)), which, bytes) {
        (Some(Object::Preference), 1, 8) | (Some(Object::Preference), 3, 4) => Ok(()),
        _ => Err(format!("attribute {which} of {bytes} bytes")),
    })
}

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
pub struct Found {
    algorithm: [u64; 8],
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [c_int; 4],
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmulAlgoGetHeuristic(
    _library: Handle,
    _desc: Handle,
    _a: Handle,
    _b: Handle,
    _c: Handle,
    _d: Handle,
    _preference: Handle,
    most: c_int,
    found: *mut Found,
    count: *mut c_int,
) -> Status {
    answer("cublasLtMatmulAlgoGetHeuristic", |_| {
        // Two, so that the search among them runs.
        let several = most.clamp(0, 2);
        for i in 0..several as u64 {
            let one = Found { algorithm: [i; 8], workspace: 0, state: 0, waves: 1.0, reserved: [0; 4] };
            // SAFETY: an array of so many places.
            unsafe { found.add(i as usize).write(one) };
        }
        give(count, several)
    })
}

/// Bytes from the first element of a column-major matrix to its last.
fn extent(l: &Layout) -> usize {
    ((l.columns - 1) * l.ld as u64 + l.rows) as usize * l.size
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasLtMatmul(
    library: Handle,
    desc: Handle,
    alpha: *const f32,
    a: u64,
    a_layout: Handle,
    b: u64,
    b_layout: Handle,
    beta: *const f32,
    c: u64,
    c_layout: Handle,
    d: u64,
    d_layout: Handle,
    algorithm: *const [u64; 8],
    workspace: u64,
    workspace_bytes: usize,
    stream: Handle,
) -> Status {
    objects("cublasLtMatmul", |all, state| {
        let layout = |handle: Handle| match all.get(&(handle as usize)) {
            Some(Object::Layout(layout)) => Ok(*layout),
            _ => Err("no layout".to_owned()),
        };
        let (Some(Object::Library), Some(Object::Desc(desc))) =
            (all.get(&(library as usize)), all.get(&(desc as usize)))
        else {
            return Err("no library or descriptor".into());
        };
        if alpha.is_null() || beta.is_null() || algorithm.is_null() || c != d || c_layout != d_layout {
            return Err("scalars, an algorithm, and a sum where the result is".into());
        }
        let (al, bl, dl) = (layout(a_layout)?, layout(b_layout)?, layout(d_layout)?);
        let turned = |l: &Layout, t: u32| if t == 0 { (l.rows, l.columns) } else { (l.columns, l.rows) };
        let ((m, k), (k2, n)) = (turned(&al, desc.transposed[0]), turned(&bl, desc.transposed[1]));
        if k != k2 || (m, n) != (dl.rows, dl.columns) {
            return Err(format!("{m} x {k} by {k2} x {n} to {} x {}", dl.rows, dl.columns));
        }
        let mut touched = vec![(a, extent(&al)), (b, extent(&bl)), (d, extent(&dl)), (workspace, workspace_bytes)];
        if desc.epilogue & 4 != 0 {
            touched.push((desc.bias, dl.rows as usize * dl.size));
        }
        if desc.epilogue & 128 != 0 {
            if desc.aux_ld < dl.rows {
                return Err(format!("what GELU is taken of has columns {} apart", desc.aux_ld));
            }
            touched.push((desc.aux, extent(&Layout { ld: desc.aux_ld as i64, ..dl })));
        }
        state.products += 1;
        state.work(stream, format!("cublasLtMatmul {m} x {n} x {k}"), touched).map(|_| ())
    })
}

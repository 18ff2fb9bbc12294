// Part of kv_run_float: key_run and value_run load from the KV cache, where the qkv linear has stored the row's own key and value.
const HEAD_DIM: u32 = 64u;
fn key_run(row: u32, run: u32) -> RawRun { return key8(row * (HEAD_DIM / RUN) + run); }
fn value_run(row: u32, run: u32) -> RawRun { return value8(row * (HEAD_DIM / RUN) + run); }
fn newest_key(key: RawRun, i: u32, newest: bool) -> RawRun { return key; }
fn newest_value(value: RawRun, i: u32, newest: bool) -> RawRun { return value; }
fn store_own(row: u32, kv_head: u32, token: u32, lane: u32, stores: bool) {}

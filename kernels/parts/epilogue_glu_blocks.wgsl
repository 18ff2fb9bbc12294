// Role epilogue: y[token, WIDTH / 64] = glu(gate, up) as blocks (see blocks_*). The rows of gate and up are interleaved:
// v = (gate, up) (+ bias). The workgroup epilogue stores one block of 32 values of each token from token0 up to, not including, end,
// TOKENS at most; with EPILOGUE_ROWS 32 half a block.
// Needs a workgroup (of linear_matrix a subgroup) that covers EPILOGUE_ROWS consecutive rows, N % 64 == 0, and with EPILOGUE_ROWS 32
// blocks_f16, since an int8 block has one scale. Parts: activation_*, blocks_*, hidden
// (linear_gemm_int8, linear_matrix and linear_skinny have it themselves).
const N: u32 = 64u;      // rows of this shard
const ROW0: u32 = 0u;    // the shard's first row in the matrix
const WIDTH: u32 = 64u;  // rows of the matrix
const HIDDEN_BLOCKS: u32 = WIDTH / 64u;  // blocks of a token
const TOKENS: u32 = 1u;
const EPILOGUE_ROWS: u32 = 64u;  // or 32
const BIAS: bool = false;
const PERSISTENT: bool = false;  // the workgroup goes on with other rows
const WORKGROUP: u32 = 64u;
const EPILOGUE_LANES: u32 = WORKGROUP;  // invocations that share a workgroup epilogue
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [layers][TOKENS or m] WIDTH / 64 blocks, padded after each layer
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  var gate_up = v;
  if (BIAS) { let i = slab_index() * WIDTH + ROW0 + min(row, N - 2u); gate_up += vec2<f32>(bias[i], bias[i + 1u]); }
  store_hidden(token % TOKENS * 32u + row / 2u % 32u, glu(gate_up.x, gate_up.y));
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {
  workgroupBarrier();
  const QUARTERS = EPILOGUE_ROWS / 16u;  // of a block: 4 or 2
  for (var i0 = 0u; i0 < QUARTERS * TOKENS; i0 += EPILOGUE_LANES) {  // a quarter each; the same iterations for all invocations
    let i = min(i0 + index, QUARTERS * TOKENS - 1u);
    let token = token0 + i / QUARTERS;
    let quarter = select(workgroup % 2u * 2u + i % 2u, i % 4u, QUARTERS == 4u);
    let first = block_word(token, ROW0 / 64u + workgroup / (4u / QUARTERS), HIDDEN_BLOCKS) + layer() * (block_word(TOKENS, 0u, HIDDEN_BLOCKS) + LINE_PADDING);
    let live = i0 + index == i && workgroup < N / EPILOGUE_ROWS && token < end;
    let at = token % TOKENS * 32u + quarter * 8u;
    store_block(first, HIDDEN_BLOCKS, load_hidden(at), load_hidden(at + 4u), select(quarter, index, QUARTERS == 4u), live);
  }
  if (PERSISTENT) { workgroupBarrier(); }
}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }

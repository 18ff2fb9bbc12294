// Into how many splits attend_split has cut the context.
const SPLITS: u32 = 2u;
fn split_count() -> u32 { return SPLITS; }

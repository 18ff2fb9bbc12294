// Role embed_next: does nothing. The next step looks up the embedding itself.
fn embed_next(token: u32, row: u32, index: u32) {}

// What both kernels know of a call: rows of any lengths, which tokens are queries, and what a query sees.

#define LANE int(threadIdx.x % 32)

struct Call {
    const int *row_starts, *query_starts, *tokens, *positions, *option_ids;
    int rows;
    i64 window;  // -1: none
};

// One tile of queries of one row.
struct Tile {
    int start, length;   // of the row's tokens in the pack
    int first, queries;  // of the tile in the tensor of queries, and how many of them are real
    int offset;          // of the tile in the row, where every token is a query
};

// The tile of this block when every row is cut into tiles of SIZE queries, in order; false: there are fewer tiles than blocks. All lanes of a warp search
// together, 32 rows at a time.
template <int SIZE> TW_FORCE bool find_tile(const Call& c, int index, Tile& tile) {
    int before = 0;
    for (int r0 = 0; r0 < c.rows; r0 += 32) {
        int r = r0 + LANE, tiles = r < c.rows ? (c.query_starts[r + 1] - c.query_starts[r] + SIZE - 1) / SIZE : 0, sum = tiles;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (LANE >= d) sum += other;
        }
        u32 behind = __ballot_sync(0xffffffffu, before + sum > index);
        if (behind) {
            int lane = __ffs(int(behind)) - 1, row = r0 + lane;
            int rank = index - before - (__shfl_sync(0xffffffffu, sum, lane) - __shfl_sync(0xffffffffu, tiles, lane));
            tile.start = c.row_starts[row];
            tile.length = c.row_starts[row + 1] - tile.start;
            tile.offset = rank * SIZE;
            tile.first = c.query_starts[row] + tile.offset;
            int left = c.query_starts[row + 1] - tile.first;
            tile.queries = left < SIZE ? left : SIZE;
            return true;
        }
        before += __shfl_sync(0xffffffffu, sum, 31);
    }
    return false;
}

// A token by what decides who sees it.
struct Token {
    int position, option;
};
// Token `j` of the row.
TW_FORCE Token token(const Call& c, const Tile& tile, int j) {
    Token t;
    t.position = c.positions ? c.positions[tile.start + j] : j;
    t.option = c.option_ids ? c.option_ids[tile.start + j] : 0;
    return t;
}
// The token of query `i` of the tile, as an index in its row.
TW_FORCE int query_index(const Call& c, const Tile& tile, int i) { return c.tokens ? c.tokens[tile.first + i] - tile.start : tile.offset + i; }
TW_FORCE bool sees(const Call& c, Token q, Token k) {
    i64 distance = i64(q.position) - k.position;
    if (c.window >= 0 && (distance > c.window || distance < -c.window)) return false;
    return !(q.option > 0 && k.option > 0 && q.option != k.option);
}

// Keys that some query of the tile may see. Their tiles are counted from the row's start, so that a query's sums are taken in the same order whatever runs
// beside it: a tile of which a query sees nothing changes nothing.
TW_FORCE void key_range(const Call& c, const Tile& tile, int& from, int& to) {
    from = 0, to = tile.length;
    if (c.window < 0 || c.tokens || c.positions) return;
    from = tile.offset - c.window > 0 ? int(tile.offset - c.window) : 0;
    i64 end = tile.offset + tile.queries + c.window;
    to = end < tile.length ? int(end) : tile.length;
}

#ifdef TW_HEAD
// The angles of eight channels at a position: their cosines and sines.
struct Angles {
    float4 cosines[2], sines[2];
};
TW_FORCE Angles angles_at(const float* table, int position, int chunk) {
    const float* from = table + i64(position) * TW_HEAD + chunk * 8;
    return {{*(const float4*)from, *(const float4*)(from + 4)}, {*(const float4*)(from + TW_HEAD / 2), *(const float4*)(from + TW_HEAD / 2 + 4)}};
}
// Turns eight channels of a row of a tile in shared memory, whose 16-byte chunks are permuted (chunk ^ row % 8), and their partners, rounded as they would be
// in memory.
TW_FORCE void turn(T* tile, int row, int chunk, const Angles& angles) {
    Pack<T>*a = (Pack<T>*)(tile + row * TW_HEAD + ((chunk ^ (row & 7)) * 8)), *b = (Pack<T>*)(tile + row * TW_HEAD + (((chunk + TW_HEAD / 16) ^ (row & 7)) * 8));
    Pack<T> x = *a, y = *b;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float4 c = angles.cosines[n], s = angles.sines[n];
        float cs[4] = {c.x, c.y, c.z, c.w}, sn[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int m = 0; m < 4; m++) {
            float u = to_f32(x.v[4 * n + m]), w = to_f32(y.v[4 * n + m]);
            x.v[4 * n + m] = from_f32<T>(u * cs[m] - w * sn[m]);
            y.v[4 * n + m] = from_f32<T>(w * cs[m] + u * sn[m]);
        }
    }
    *a = x, *b = y;
}
#endif

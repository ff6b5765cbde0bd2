"""What an image of tokens for packed_gemm holds; cuda/packed/packed_places.cuh has its layout."""

import torch

FIRST_COLUMNS = {  # of lane t of step s, by order
    4: lambda s, t: 64 * t + 32 * (s % 2) + 4 * (s // 2),
    6: lambda s, t: 128 * (t // 2) + 16 * (t % 2) + 32 * (s % 4) + 4 * (s // 4),
    32: lambda s, t: 16 * s + 4 * t,
}


def read_image(image, order, tokens, columns):
    """The (tokens, columns) that an image (tiles, places) holds."""
    tiles = image.shape[0]
    of_tile = image.shape[1] // columns
    pieces = image.view(tiles, columns // 256, 4, of_tile, 8, 8)
    row = torch.arange(of_tile)
    plain = torch.stack(
        [pieces[:, :, :, row, piece ^ (row % 8)] for piece in range(8)], dim=4
    )  # tiles, units, matrices, tokens, pieces, 8
    out = torch.empty(tiles, of_tile, columns // 256, 256, dtype=image.dtype)
    steps = plain.view(tiles, columns // 256, 4, of_tile, 4, 16)
    for s in range(16):
        for t in range(4):
            first = FIRST_COLUMNS[order](s, t)
            for i, place in enumerate((2 * t, 2 * t + 8, 2 * t + 1, 2 * t + 9)):
                values = steps[:, :, s // 4, :, s % 4, place]
                out[:, :, :, first + i] = values.transpose(1, 2)
    return out.view(-1, columns)[:tokens], out.view(-1, columns)[tokens:]

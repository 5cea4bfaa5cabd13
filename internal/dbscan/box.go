package dbscan

// box is the smallest box around some points, its faces included.
//
// gap2 and span2 bound dist2 of any point of one box to any point of the other
// from below and above, as computed and not only in theory: rounding never
// turns a smaller number into a larger one, and they round the same operations
// in the same order as dist2. So a comparison with eps² that a bound decides is
// decided exactly.
type box struct{ lo, hi point }

func boxOf(pts []point) box {
	b := box{lo: pts[0], hi: pts[0]}
	for i := 1; i < len(pts); i++ {
		p := &pts[i]
		for k, x := range p {
			b.lo[k] = min(b.lo[k], x)
			b.hi[k] = max(b.hi[k], x)
		}
	}
	return b
}

// gap2 is the squared distance between the nearest points of two boxes.
func (b *box) gap2(o *box) float64 {
	sum := 0.0
	for k := range b.lo {
		sum += square(max(o.lo[k]-b.hi[k], b.lo[k]-o.hi[k], 0))
	}
	return sum
}

// span2 is the squared distance between the farthest points of two boxes.
func (b *box) span2(o *box) float64 {
	sum := 0.0
	for k := range b.lo {
		sum += square(max(o.hi[k]-b.lo[k], b.hi[k]-o.lo[k]))
	}
	return sum
}

// gapTo2 is the squared distance from p to the nearest point of the box.
func (b *box) gapTo2(p *point) float64 {
	sum := 0.0
	for k, x := range p {
		sum += square(max(b.lo[k]-x, x-b.hi[k], 0))
	}
	return sum
}

// widest returns the axis on which the box is longest, and that length.
func (b *box) widest() (axis int, length float64) {
	for k := range b.lo {
		if l := b.hi[k] - b.lo[k]; l > length {
			axis, length = k, l
		}
	}
	return axis, length
}

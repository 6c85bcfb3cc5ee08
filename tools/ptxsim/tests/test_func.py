"""Device functions and calls, jump tables, and what programs call that has no body."""

import numpy as np
import ptxsim
import pytest
from ptx import HEADER

LANE = np.arange(32, dtype=np.uint32)
FUNCTIONS = """
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 vprintf_param_0, .param .b64 vprintf_param_1);
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e) .noreturn;
.func (.reg .b32 %out) triple (.reg .b32 %in)
{ .reg .b32 %r<3>; add.s32 %r1, %in, %in; add.s32 %in, %r1, %in; mov.b32 %out, %in; ret; }
.visible .func (.param .b32 func_retval0) weigh (.param .b32 p0, .param .align 8 .b8 p1[16])
{
  .reg .b32 %r<8>; .reg .b64 %d<3>; .reg .pred %p<2>;
  ld.param.b32 %r1, [p0]; ld.param.v2.b32 {%r2, %r3}, [p1]; ld.param.b64 %d1, [p1+8]; cvt.u32.u64 %r4, %d1;
  setp.lt.u32 %p1, %r1, 16; @%p1 bra SMALL;
  mad.lo.s32 %r5, %r1, %r2, %r3; st.param.b32 [func_retval0], %r5; ret;
  SMALL: st.param.b32 [func_retval0], %r4; ret;
}
.func (.param .b32 func_retval0) nested (.param .b32 p0)
{
  .reg .b32 %r<3>; ld.param.b32 %r1, [p0];
  call.uni (%r1), triple, (%r1); { .param .b32 a; st.param.b32 [a], %r1; call.uni (func_retval0), add_one, (a); } ret;
}
.func (.param .b32 r) add_one (.param .b32 p)
{ .reg .b32 %r; ld.param.b32 %r, [p]; add.s32 %r, %r, 1; st.param.b32 [r], %r; }
.func leave { exit; }
.func loop (.reg .b32 %n) { .reg .b32 %m; add.s32 %m, %n, -1; call loop, (%m); ret; }
"""


def run(body, functions=FUNCTIONS, **options):
    """%r0 of each lane after ``body``, which begins with the lane in %l."""
    out = np.full(32, 999, np.uint32)
    text = f"""{HEADER}{functions}
.global .align 1 .b8 text[6] = {{104, 101, 108, 108, 111, 0}};
.visible .entry k(.param .u64 out)
{{
.reg .pred %p<8>; .reg .b32 %r<30>; .reg .b64 %d<9>; .reg .b32 %l;
mov.u32 %l, %laneid; mov.b32 %r0, 0;
{body}
ld.param.b64 %d0, [out]; mad.wide.u32 %d0, %l, 4, %d0; st.global.b32 [%d0], %r0;
ret;
}}"""
    ptxsim.load(text).launch(grid=1, block=32, params=[out], memory=[out], **options)
    return out


CALL_WEIGH = """{ .param .b32 param0; .param .align 8 .b8 param1[16]; .param .b32 retval0;
  st.param.b32 [param0], %l; st.param.v2.b32 [param1], {7, 11}; st.param.b64 [param1+8], 77;
  call.uni (retval0), weigh, (param0, param1); ld.param.b32 %r0, [retval0]; }"""


AGAIN = "AGAIN: call (%r0), add_one, (%r0); setp.lt.u32 %p1, %r0, %l; @%p1 bra AGAIN;"


@pytest.mark.parametrize(
    "body, want",
    [
        ("call (%r0), triple, (%l);", 3 * LANE),
        ("call.uni (%r0), triple, (5);", np.full(32, 15)),
        ("call (%r1), triple, (%l); call (%r0), triple, (%r1);", 9 * LANE),
        (CALL_WEIGH, np.where(LANE < 16, 77, 7 * LANE + 11)),
        ("{ .param .b32 q; st.param.b32 [q], 3; call (%r0), triple, (q); }", np.full(32, 9)),
        ("{ .param .b32 q; call (q), triple, (%l); ld.param.b32 %r0, [q]; }", 3 * LANE),
        ("call (%r0), add_one, (%l);", LANE + 1),
        ("call (%r0), nested, (%l);", 3 * LANE + 1),
        ("setp.lt.u32 %p0, %l, 8; @%p0 call (%r0), triple, (%l);", np.where(LANE < 8, 3 * LANE, 0)),
        ("setp.lt.u32 %p0, %l, 8; @!%p0 call (%r0), nested, (%l);", np.where(LANE < 8, 0, 3 * LANE + 1)),
        ("setp.lt.u32 %p0, %l, 8; @%p0 call leave;", np.where(LANE < 8, 999, 0)),
        (CALL_WEIGH + CALL_WEIGH.replace("77", "78").replace("[16]", "[24]"), np.where(LANE < 16, 78, 7 * LANE + 11)),
        (AGAIN, np.maximum(LANE, 1)),
    ],
)  # fmt: skip
def test_calls_compute_what_their_functions_say(body, want):
    np.testing.assert_array_equal(run(body), want)


def test_names_of_parameters_may_come_again_with_another_size():
    body = """{ .param .b32 a; st.param.b32 [a], 5; } { .param .align 8 .b8 a[64]; .reg .b64 %x; st.param.b64 [a+56], 9;
      ld.param.b64 %x, [a+56]; cvt.u32.u64 %r0, %x; }"""
    np.testing.assert_array_equal(run(body), 9)


def test_shared_memory_of_a_function_is_there_once_and_local_memory_once_a_call():
    keep = """.func (.reg .b32 %old) keep (.reg .b32 %new)
      { .shared .align 4 .b32 kept; ld.shared.b32 %old, [kept]; bar.warp.sync -1; st.shared.b32 [kept], %new; ret; }
      .func (.reg .b32 %r) own (.reg .b32 %v)
      { .local .align 4 .b32 x; ld.local.b32 %r, [x]; st.local.b32 [x], %v; ret; }"""
    body = "call (%r1), keep, (17); call (%r2), keep, (4); call (%r3), own, (5); call (%r4), own, (6);"
    got = run(body + "mad.lo.s32 %r0, %r4, 100, %r2;", keep, off=["uninitialized", "race"])
    np.testing.assert_array_equal(got, 17)


def test_printf_prints_nothing_and_returns():
    body = """{ .reg .b64 %s; .param .b64 a; .param .b64 b; .param .b32 r; mov.u64 %s, text; cvta.global.u64 %s, %s;
      st.param.b64 [a], %s; st.param.b64 [b], 0; call.uni (r), vprintf, (a, b); ld.param.b32 %r0, [r]; }"""
    np.testing.assert_array_equal(run(body), 0)


ASSERT = """setp.ne.u32 %p0, %l, 9; @%p0 bra FINE;
  {{ .reg .b64 %s; .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d;
  .param .b64 e; mov.u64 %s, text; cvta.global.u64 %s, %s; st.param.b64 [a], %s; st.param.b64 [b], %s;
  st.param.b32 [c], 41; st.param.b64 [d], %s; st.param.b64 [e], 1; call.uni {}, (a, b, c, d, e); }} FINE:"""


def test_a_failed_assertion_stops_with_its_text():
    with pytest.raises(ptxsim.SimulationError, match=r"^assertion failed: hello, hello:41, hello\n.*lane 9\n"):
        run(ASSERT.format("__assertfail"))


def test_reports_show_the_line_within_the_function():
    function = ".func poke (.reg .b64 %d)\n{\nst.global.b32 [%d], 1;\nret; }"
    with pytest.raises(ptxsim.SimulationError, match=r"^global_bounds(.|\n)*PTX line 6, (.|\n)*st.global.b32 .%d., 1;"):
        run("mov.b64 %d1, 64; call poke, (%d1);", function)


@pytest.mark.parametrize(
    "body, message",
    [
        ("call loop, (%l);", "recursive call"),
        (ASSERT.format("unheard_of"), "call of `unheard_of`, which has no body"),
        ("mov.b64 %d1, 0; call (%r0), %d1, (%l), proto;", "indirect call"),
        ("proto: .callprototype (.reg .b32 _) _ (.reg .b32 _); call (%r0), triple, (%l), proto;", "indirect call"),
        ("call (%r0), triple, (%l, %l);", "another number of parameters"),
        ("{ .param .b8 p[8]; call (%r0), weigh, (%l, p); }", "smaller than the function's"),
        ("call (%r0), triple, (%d1);", "register %d1 has 8 bytes"),
    ],
)
def test_calls_that_can_not_be_made_stop_with_text_and_line(body, message):
    with pytest.raises(ptxsim.SimulationError, match=f"PTX line [0-9]+: .*{message}(.|\n)*call"):
        run(body)


JUMP = """table: .branchtargets A, B, C;
  {} brx.idx{} %r1, table; mov.b32 %r0, 7; bra END;
  A: mov.b32 %r0, 10; bra END; B: mov.b32 %r0, 20; bra END; C: mov.b32 %r0, 30; END:"""


@pytest.mark.parametrize("guard", ["", "@%p0"])
def test_a_jump_table_sends_every_lane_where_it_belongs(guard):
    body = "rem.u32 %r1, %l, 3; setp.lt.u32 %p0, %l, 20;" + JUMP.format(guard, "")
    want = np.array([10, 20, 30])[LANE % 3]
    np.testing.assert_array_equal(run(body), np.where((LANE < 20) | (guard == ""), want, 7))


def test_a_uniform_jump_and_one_within_a_function():
    function = ".func (.reg .b32 %r0) pick (.reg .b32 %r1) {" + JUMP.format("", ".uni") + " ret; }"
    np.testing.assert_array_equal(
        run("call (%r2), pick, (2); call (%r0), pick, (1); add.s32 %r0, %r0, %r2;", function), 50
    )


def test_an_index_behind_the_table_stops_the_run():
    with pytest.raises(ptxsim.SimulationError, match=r"brx.idx: index 3 of a list of 3"):
        run("mov.b32 %r1, 3;" + JUMP.format("", ""))

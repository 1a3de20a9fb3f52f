#include "data/html.h"

#include <gtest/gtest.h>

#include "support.h"

namespace furious {
namespace {

TEST(Html, TagsBecomeTheLayoutOfTheText) {
  EXPECT_EQ(html_to_text("<h1>Title</h1>\n<p>one <b>two</b>\n  three</p><p>four<br>five<br/><br>six"),
            "Title\n\none two three\n\nfour\nfive\n\nsix");
  EXPECT_EQ(html_to_text("<ul><li>a<li>b</ul>c"), "a\nb\nc");
  EXPECT_EQ(html_to_text("<table><tr><th>x<th>y</tr>\n<tr><td>1</td> <td>2</td></tr></table>"), "x\ty\n1\t2");
  EXPECT_EQ(html_to_text("a<span>b</span><i>c</i> d"), "abc d");
  EXPECT_EQ(html_to_text("<div>a</div><div>b</div>"), "a\nb");
  EXPECT_EQ(html_to_text("x<pre>\n  keep\n    this </pre>y  z"), "x\n\n  keep\n    this \n\ny z");
}

TEST(Html, ScriptsStylesAndCommentsAreDropped) {
  EXPECT_EQ(html_to_text("a<script>if (1 < 2) '</p>'</SCRIPT>b<style>p {}</style >c"), "abc");
  EXPECT_EQ(html_to_text("a<!-- <b> -- > -->b<!-->c<!doctype html>d<?xml version='1'?>e"), "abcde");
  EXPECT_EQ(html_to_text("a<script>never closed"), "a");
  EXPECT_EQ(html_to_text("a<!-- never closed"), "a");
}

TEST(Html, References) {
  EXPECT_EQ(html_to_text("&amp;&lt;&gt;&quot;&apos;&eacute;&mdash;&hearts;"), "&<>\"'é—♥");
  EXPECT_EQ(html_to_text("&#65;&#x42;&#X43 &#128512;&#150;"), "ABC 😀–");
  EXPECT_EQ(html_to_text("a&nbsp;&nbsp;b"), "a b");
  EXPECT_EQ(html_to_text("AT&T &copy 2024 &unknown; & &; &#; &#x; &ampere"),
            "AT&T © 2024 &unknown; & &; &#; &#x; &ampere");
  EXPECT_EQ(html_to_text("&#0;&#xD800;&#x110000;&#99999999999;"), "\uFFFD\uFFFD\uFFFD\uFFFD");
}

TEST(Html, DamagedMarkup) {
  EXPECT_EQ(html_to_text("1 < 2 <3 <"), "1 < 2 <3 <");
  EXPECT_EQ(html_to_text("a<p title=\"x > y\">b<a href='>'>c</a>"), "a\n\nbc");
  EXPECT_EQ(html_to_text("a<p don't>b"), "a\n\nb");
  EXPECT_EQ(html_to_text("a<b never closed"), "a");
  EXPECT_EQ(html_to_text(""), "");
}

// However the page is cut, also inside names, quotes and references.
TEST(Html, PiecesOfAnySizeGiveTheSameText) {
  const std::string page =
      "<!DOCTYPE html><h1 a='>'>T&eacute;&#x41;&amp</h1><!-- c --><script>x</script><p>a<pre> b\n</pre>&nbsp;c &bogus; "
      "<";
  const std::string expected = html_to_text(page);
  for (size_t size = 1; size < page.size(); ++size) {
    HtmlText reader;
    std::string text;
    for (size_t at = 0; at < page.size(); at += size) reader.feed(std::string_view(page).substr(at, size), text);
    reader.finish(text);
    EXPECT_EQ(text, expected) << size;
  }
}

}  // namespace
}  // namespace furious
